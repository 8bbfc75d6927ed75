"""Attention: settings in `config.json`, packed sequences in few calls, rotation, latents."""
