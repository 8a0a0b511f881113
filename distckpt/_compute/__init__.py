"""Tensors that an export computes: sums, adapters, codes and scales."""
