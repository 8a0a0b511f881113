"""Rules that turn a checkpoint's tensors into another's: names and shapes only, no data.

Two programs store the same model under other names, with layers stacked, projections fused,
vocabularies padded. A list of rules says how one gets from the first form to the second. Rules are
applied in order, each to the result of the rules before it, so they combine freely; `apply_rules`
returns where every region of every new tensor comes from, and `invert` the way back.

Key patterns: `*` matches one dotted component (one or more characters other than a dot), `**` one
or more components. In new names, `{0}` is the match of the first of them, `{1}` of the second and
so on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distckpt._base.public import first_use

if TYPE_CHECKING:
    from distckpt.rules._mapped import (
        MappedTensor,
        RegionCopy,
        TensorSpec,
        resolve,
        resolve_padding,
        target_view,
    )
    from distckpt.rules._pieces import Concat, Interleave, Split, SplitQKV, Stack, Unstack
    from distckpt.rules._rule import Rule
    from distckpt.rules._rules import (
        Add,
        Assemble,
        Copy,
        Drop,
        Rename,
        Tie,
        Transpose,
        Trim,
        apply_rules,
        invert,
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

if not TYPE_CHECKING:  # else a type checker believes that the package has every name

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # Imported when it is needed: other modules of the package need one of these files.
        from distckpt.rules import _mapped, _pieces, _rule, _rules

        return first_use(name, globals(), _mapped, _pieces, _rule, _rules)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
