"""Moving tensors between the memories of ranks: planning, shared memory, and carrying it out."""
