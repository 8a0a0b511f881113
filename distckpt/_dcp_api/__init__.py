"""The interfaces of torch.distributed.checkpoint.

`distckpt.dcp` and `distckpt.hf` are the public paths.
"""
