"""Moving tensors between the memories of ranks: planning, shared memory, and the transfers."""
