"""Layers that several ranks share by their columns, rows or vocabulary, on plain torch.distributed groups."""
