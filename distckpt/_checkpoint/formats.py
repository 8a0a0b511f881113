"""The formats of other programs that distckpt reads."""

READERS = {
    "deepspeed": ("distckpt._foreign.deepspeed.reader", "DeepSpeedReader"),
    "torch_dist": ("distckpt._foreign.torch_dist.reader", "TorchDistReader"),
    "huggingface": ("distckpt._foreign.hugging_face", "HuggingFaceReader"),
}
"""Module and class of the reader of each format by name.

They are imported when a location is not a checkpoint of distckpt. The last one looks first.
"""
