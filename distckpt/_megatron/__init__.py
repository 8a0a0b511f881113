"""Names that only programs written for Megatron Core use; the public modules of those names import
them from here.
"""
