"""Turns a plain model into a parallel one. `apply.py` lists the techniques in the order in which they compose."""
