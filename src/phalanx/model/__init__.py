"""The transformer as plain single-device PyTorch; it knows no process group."""
