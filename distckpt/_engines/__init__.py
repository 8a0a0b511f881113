"""What inference engines are given: tensors in bounded memory, and buckets of bytes."""
