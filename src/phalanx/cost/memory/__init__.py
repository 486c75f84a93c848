"""Bytes on each device over a step, by formula."""
