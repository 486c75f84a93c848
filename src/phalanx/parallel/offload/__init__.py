"""State that leaves the device: in host memory, in files, and activations between the passes."""
