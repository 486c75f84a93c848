"""Runs on several nodes, each with a launcher of its own: who takes part, and what happens when that changes."""
