"""The module paths of Megatron Core's `dist_checkpointing.strategies`."""
