"""Rules that make tensors with new names and shapes from others, and rules of model families."""
