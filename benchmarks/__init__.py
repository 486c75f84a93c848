"""Side-by-side measurements. Each module is a program that writes its figures to benchmarks/results."""
