"""Names that only programs for Megatron Core use.

The public modules of those names import them from here.
"""
