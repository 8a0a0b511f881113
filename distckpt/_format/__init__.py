"""The format on disk: safetensors files, the manifest, encoded objects, Hugging Face names."""
