"""The description of a model: per kind of block its operators with their weights, FLOPs, saved tensors and messages."""
