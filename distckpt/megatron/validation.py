"""Check that shards make complete tensors, and that keys match a checkpoint's."""

import logging

from distckpt._base.public import set_public_home
from distckpt._commit.presence import READER_VERSION
from distckpt._state.strictness import StrictHandling, parse_strict_flag
from distckpt.megatron._impl.validation import (
    adjust_non_strict_load,
    determine_global_metadata,
    maybe_report_missing_and_unexpected_keys,
    save_integrity_manifest,
    validate_integrity_and_strict_load,
    validate_sharding_integrity,
    verify_checkpoint,
    verify_integrity_manifest,
)

__all__ = [
    "INTEGRITY_FNAME",
    "READER_VERSION",
    "StrictHandling",
    "adjust_non_strict_load",
    "determine_global_metadata",
    "maybe_report_missing_and_unexpected_keys",
    "parse_strict_flag",
    "save_integrity_manifest",
    "validate_integrity_and_strict_load",
    "validate_sharding_integrity",
    "verify_checkpoint",
    "verify_integrity_manifest",
]

set_public_home(globals())

logger = logging.getLogger(__name__)

INTEGRITY_FNAME = "integrity.json"
"""Megatron's file of hashes; distckpt has checksums in its own files."""
