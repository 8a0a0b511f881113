"""Checkpoints of DeepSpeed: those of ZeRO, and Universal ones."""
