"""Where the weight loader of an engine puts the elements of stored tensors."""
