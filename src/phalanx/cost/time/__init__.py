"""Seconds of a step by formula."""
