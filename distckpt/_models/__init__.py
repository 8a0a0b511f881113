"""Modules, optimizers and other objects as shards: described for a save or load, then filled."""
