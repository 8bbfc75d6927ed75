"""Checkpoints from one format into another, without a GPU and without the ranks of a layout: tensors pass through one by one."""
