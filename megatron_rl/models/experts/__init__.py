"""Mixtures of experts: settings in `config.json`, router, counts, losses, token dispatch."""
