"""`make gpu`: parity, memory, throughput and kernels of this program on a machine with NVIDIA GPUs. See docs/guides/gpu.md."""
