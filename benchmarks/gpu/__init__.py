"""`make gpu`: parity, memory, throughput and kernels of Phalanx on a machine with NVIDIA GPUs. See docs/guides/gpu.md."""
