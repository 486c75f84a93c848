"""Training frameworks: what of time and memory depends on them."""
