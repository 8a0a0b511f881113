"""Tiers of a checkpoint manager: the disks of hosts, their peers, and the store."""
