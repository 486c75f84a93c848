"""Checkpoints: written by all ranks in parallel, read into any layout, kept and removed by a policy."""
