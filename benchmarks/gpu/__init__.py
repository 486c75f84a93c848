"""`make gpu`: parity, memory, throughput and kernels of Phalanx on a machine with NVIDIA GPUs. docs/guides/gpu.md."""
