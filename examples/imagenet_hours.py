"""Hours of ResNet-50 on ImageNet by data parallelism, from published figures: Goyal et al. 2017 (Accurate, large
minibatch SGD) took 29 hours on 8 P100 and one hour on 256, 90 epochs with 32 images per GPU and step.

    python examples/imagenet_hours.py
"""

from __future__ import annotations

IMAGES, EPOCHS, PER_GPU = 1_281_167, 90, 32
PARAMETERS = 25.6e6
HOURS_OF_8 = 29.0
PUBLISHED = {8: 29.0, 256: 1.0}
LINK = 50e9 / 8  # bytes per second of a node's 50 Gbit/s Ethernet, for its 8 GPUs
BACKWARD = 2 / 3  # share of a step's computation, behind which gradients are summed


def hours(gpus: int) -> tuple[float, float]:
    """Returns the hours on so many GPUs, and the exposed seconds of a step's all-reduce."""
    steps_of_8 = EPOCHS * IMAGES / (8 * PER_GPU)
    compute, nodes = HOURS_OF_8 * 3600 / steps_of_8, gpus // 8
    ring = 2 * (nodes - 1) / nodes * 4 * PARAMETERS / LINK  # fp32 gradients, between nodes
    exposed = max(0.0, ring - BACKWARD * compute)
    return EPOCHS * IMAGES / (gpus * PER_GPU) * (compute + exposed) / 3600, exposed


def main() -> None:
    print("GPUs  batch   hours  exposed per step  published  efficiency there")
    for gpus in (8, 16, 32, 64, 128, 256, 512, 1024, 2048):
        found, exposed = hours(gpus)
        said = PUBLISHED.get(gpus)
        there = f"{said:8.1f} h {HOURS_OF_8 * 8 / (said * gpus):17.0%}" if said else ""
        print(f"{gpus:4}  {gpus * PER_GPU:5}  {found:5.2f} h  {1000 * exposed:13.1f} ms  {there}".rstrip())


if __name__ == "__main__":
    main()
