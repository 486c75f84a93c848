"""Training frameworks: the constants of time and memory that depend on them."""
