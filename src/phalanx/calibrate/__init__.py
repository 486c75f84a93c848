"""Measures this machine for cluster=local."""
