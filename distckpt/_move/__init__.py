"""Moving tensors between the memories of ranks: planning, transfers, recorded weight loaders."""
