"""The fault bench: faults injected for real into runs of a tiny model, and what became of them: docs/guides/chaos.md."""
