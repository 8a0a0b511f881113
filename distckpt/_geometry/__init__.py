"""Regions of tensors, and tensors pieced together from other tensors' regions."""
