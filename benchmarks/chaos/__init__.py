"""The fault bench: faults injected for real into runs, and what became of them: docs/guides/chaos.md."""
