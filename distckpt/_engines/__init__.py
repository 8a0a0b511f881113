"""The exports for inference engines: tensors in bounded memory, and buckets of bytes."""
