"""Quantised tensors: values that are stored as codes with scales."""
