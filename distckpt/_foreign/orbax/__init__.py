"""Checkpoints of Orbax, read with tensorstore and without JAX."""
