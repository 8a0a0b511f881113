"""Machinery of the public modules beside it."""
