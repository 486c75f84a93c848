"""Optimizers as facts: the state that each keeps, what a step moves and computes. Imports no torch."""
