"""Measures the machine it runs on and fits the cost model's cluster to it."""
