"""State dicts of PyTorch, as `torch.distributed.checkpoint` names them."""
