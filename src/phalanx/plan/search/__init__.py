"""The space of legal layouts, lower bounds, branch and bound, refinement."""
