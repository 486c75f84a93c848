"""Proof that a job's model computes the same under any layout as on one process: `phalanx verify`."""
