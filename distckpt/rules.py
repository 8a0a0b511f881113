"""Rules that turn a checkpoint's tensors into another's: names and shapes only, no data.

Two programs store the same model under other names, with layers stacked, projections fused,
vocabularies padded. A list of rules says how one gets from the first form to the second. Rules are
applied in order, each to the result of the rules before it, so they combine freely; `apply_rules`
returns where every region of every new tensor comes from, and `invert` the way back.

Key patterns: `*` matches one dotted component (one or more characters other than a dot), `**` one
or more components. In new names, `{0}` is the match of the first of them, `{1}` of the second and
so on.
"""

from distckpt._base.public import set_public_home
from distckpt._rules.mapped import (
    MappedTensor,
    RegionCopy,
    TensorSpec,
    invert,
    resolve,
    resolve_padding,
    target_view,
)
from distckpt._rules.pieces import Concat, Interleave, Split, SplitQKV, Stack, Unstack
from distckpt._rules.rule import Rule
from distckpt._rules.rules import (
    Add,
    Assemble,
    Copy,
    Drop,
    Rename,
    Tie,
    Transpose,
    Trim,
    apply_rules,
)

__all__ = [
    "Add",
    "Assemble",
    "Concat",
    "Copy",
    "Drop",
    "Interleave",
    "MappedTensor",
    "RegionCopy",
    "Rename",
    "Rule",
    "Split",
    "SplitQKV",
    "Stack",
    "TensorSpec",
    "Tie",
    "Transpose",
    "Trim",
    "Unstack",
    "apply_rules",
    "invert",
    "resolve",
    "resolve_padding",
    "target_view",
]

set_public_home(globals())
