"""Rules that rename and reshape tensors, and rules of model families."""
