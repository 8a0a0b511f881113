"""Rules that make tensors of one name and shape from those of others, and the rules of families of
models.
"""
