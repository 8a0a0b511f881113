"""Optimizers: their states as shards and settings, and back."""
