"""Objects with a state in a state dict: modules, optimizers, and whatever has a `state_dict`."""
