"""Regions of tensors: intersecting, cutting, comparing, and dividing them into units of work."""
