"""Schemes of URLs, and the object stores that they are for."""

from __future__ import annotations

PROVIDERS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "az": "azure",
    "abfs": "azure",
    "abfss": "azure",
}
"""The object store that each scheme of URLs is for. All other schemes are fsspec's."""
