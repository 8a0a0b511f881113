"""Hugging Face checkpoints: consolidation under the names of torch and NeMo Automodel, file names
and the index.

`consolidate_safetensors_files` and `consolidate_safetensors_files_on_every_rank` take the arguments
of torch's and NeMo Automodel's functions of these names; change the import. `distckpt.consolidate`
can do more.
"""

from distckpt._base.public import set_public_home
from distckpt._format.hf_names import (
    derive_base_prefix_from_path,
    index_filename,
    index_json,
    output_filenames,
    shard_filename,
)
from distckpt.hf._consolidation import (
    HuggingFaceConsolidationStrategy,
    consolidate_safetensors_files,
    consolidate_safetensors_files_on_every_rank,
)
from distckpt.hf._shard_layout import group_keys_by_shard_size, optimize_shard_layout

__all__ = [
    "HuggingFaceConsolidationStrategy",
    "consolidate_safetensors_files",
    "consolidate_safetensors_files_on_every_rank",
    "derive_base_prefix_from_path",
    "group_keys_by_shard_size",
    "index_filename",
    "index_json",
    "optimize_shard_layout",
    "output_filenames",
    "shard_filename",
]

set_public_home(globals())
