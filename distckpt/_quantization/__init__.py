"""Quantized tensors: values that are stored as codes with scales."""
