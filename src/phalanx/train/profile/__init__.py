"""Profiles of steps: what is recorded, the shares of a step's time, traces, memory, and the document of a profile."""
