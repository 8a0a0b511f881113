"""State of other libraries: Megatron Core's sharded state dicts, and checkpoints of PyTorch's own format."""
