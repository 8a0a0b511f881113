"""What is known of families of models: how other programs name, stack and fuse their tensors."""
