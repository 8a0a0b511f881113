"""Offline work in parts: any number of processes, without a process group, that may be killed."""
