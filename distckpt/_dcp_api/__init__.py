"""The interface of torch.distributed.checkpoint; `distckpt.dcp` is the public path."""
