"""Regions of tensors, and how tensors are pieced together from regions of others."""
