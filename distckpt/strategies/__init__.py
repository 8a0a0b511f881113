"""Strategies: how sharded tensors and objects get into a directory and out of it again."""

from distckpt.strategies import safetensors as safetensors
