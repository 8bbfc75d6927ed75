"""Settings of other projects as ours, and adapters for their plug-ins. A workshop: no run needs it."""
