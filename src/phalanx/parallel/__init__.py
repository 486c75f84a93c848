"""How a plain model becomes a parallel one. `apply.py` lists the techniques in the order in which they compose."""
