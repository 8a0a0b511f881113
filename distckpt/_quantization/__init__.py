"""Tensors whose values are stored as codes with scales."""
