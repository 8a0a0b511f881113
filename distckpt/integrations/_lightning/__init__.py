"""Machinery of `distckpt.integrations.lightning`."""
