"""Verbs on whole checkpoints: reshard, diff, statistics, comparing with memory."""
