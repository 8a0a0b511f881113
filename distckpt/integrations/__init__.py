"""Checkpoints of training libraries: a module for each, which imports its library."""
