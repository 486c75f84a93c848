"""Event simulation of a training step: its timeline, its trace events, and the time lost to failures."""
