"""The machinery of the sharded classes; `distckpt.mapping` is the public path."""
