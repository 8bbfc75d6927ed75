"""Mixtures of experts: what `config.json` says of them, the router with its counts and losses, tokens on their way to experts."""
