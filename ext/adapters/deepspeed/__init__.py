"""The DeepSpeed host."""
