"""DeepSpeed checkpoints, of ZeRO and Universal."""
