"""Optimizers: what their states are stored as, and how they are restored."""
