"""The rooms of the package: the kernel, which the verbs need, and the wings, which hang on it."""

from __future__ import annotations

KERNEL = [
    "_base",
    "_geometry",
    "_storage",
    "_ranks",
    "rules",
    "families",
    "_format",
    "_quantization",
    "mapping",
    "_commit",
    "_state",
    "_plan",
    "_io",
    "_checkpoint",
    "_models",
    "strategies",
    "_operations",
]
"""Low to high: what `save`, `load`, `consolidate` and `verify` are made of."""

WINGS = [
    "_foreign",
    "torch_dist",
    "_compute",
    "_tools",
    "_move",
    "streaming",
    "manager",
    "engines",
    "megatron",
    "tasks",
    "dcp",
    "hf",
    "jax",
    "integrations",
    "_pages",
    "cli",
]
"""Low to high: the kernel imports none of them, and works without them."""
