"""Training: the loop, optimizer, checkpoints, metrics, and the run directory."""
