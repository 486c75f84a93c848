"""Event simulation of a training step: its timeline, in trace events and pictures, and the time that failures cost."""
