"""Shards of modules and optimizers."""
