"""Training: the loop, and what it needs: optimizer, checkpoints, metrics, the run directory."""
