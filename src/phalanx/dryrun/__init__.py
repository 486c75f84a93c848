"""The real program of one rank, run without its hardware and without the other ranks."""
