"""Checkpoints of torch.distributed.checkpoint and of Megatron Core."""
