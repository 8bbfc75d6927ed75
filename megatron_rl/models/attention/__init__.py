"""Attention: what `config.json` says of it, how packed sequences become a few calls, rotation, latent attention."""
