"""Megatron's preparation of state dicts; `distckpt.save` and `load` need none of it."""

from distckpt._base.public import set_public_home
from distckpt.megatron._impl.state_dicts import (
    filter_out_empty_flatten_tensor,
    load_preprocess,
    save_preprocess,
)

__all__ = ["filter_out_empty_flatten_tensor", "load_preprocess", "save_preprocess"]

set_public_home(globals())
