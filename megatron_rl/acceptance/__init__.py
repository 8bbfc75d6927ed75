"""`megatron-rl doctor --gpu`: a node is tried with real ranks and engines, a line for each promise, in about 15 minutes."""
