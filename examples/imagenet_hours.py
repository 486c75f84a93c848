"""Hours of ResNet-50 on ImageNet by data parallelism, 90 epochs with 32 images per P100 and step: a model of two lines,
against what was published.

    python examples/imagenet_hours.py
"""

from __future__ import annotations

IMAGES = 1_281_167  # of the training set: Russakovsky et al. 2015, table 2
EPOCHS, PER_GPU = 90, 32  # Goyal et al. 2017 (arXiv 1706.02677), section 5.1
PARAMETERS = 25.6e6  # He et al. 2016 with 1000 classes: 25,557,032
HOURS_OF_8 = 29.0  # Goyal et al. 2017, as reported beside the 1 hour of its title and abstract
LINK = 50e9 / 8  # bytes/s of a server's 50 Gbit/s Ethernet, for its 8 P100: Goyal et al. 2017, section 4
BACKWARD = 0.120  # seconds of a backward pass on a P100, behind which gradients are summed: the same section
PUBLISHED = {8: HOURS_OF_8, 256: 1.0, 1024: 15 / 60}  # the last: Akiba et al. 2017, below
RECORDS = (
    ("Goyal et al. 2017", "arXiv 1706.02677", "256 P100", 60.0),
    ("You et al. 2018", "arXiv 1709.05011", "2048 Xeon Phi 7250", 20.0),
    ("Akiba et al. 2017", "arXiv 1711.04325", "1024 P100", 15.0),
    ("Mikami et al. 2018", "arXiv 1811.05233", "2176 V100", 224 / 60),
    ("Ying et al. 2018", "arXiv 1811.06992", "1024 TPU v3 chips", 2.2),
    ("Yamazaki et al. 2019", "arXiv 1903.12650", "2048 V100", 74.7 / 60),
)
"""Who, where, on what, and the minutes that the abstract states; of Mikami et al. that of its first version."""


def hours(gpus: int) -> tuple[float, float]:
    """Returns the hours on so many GPUs, and the exposed seconds of a step's all-reduce."""
    steps_of_8 = EPOCHS * IMAGES / (8 * PER_GPU)
    compute, nodes = HOURS_OF_8 * 3600 / steps_of_8, gpus // 8
    ring = 2 * (nodes - 1) / nodes * 4 * PARAMETERS / LINK  # fp32 gradients, between nodes
    exposed = max(0.0, ring - BACKWARD)
    return EPOCHS * IMAGES / (gpus * PER_GPU) * (compute + exposed) / 3600, exposed


def main() -> None:
    print("GPUs  batch   hours  exposed per step  published  efficiency there")
    for gpus in (8, 16, 32, 64, 128, 256, 512, 1024, 2048):
        found, exposed = hours(gpus)
        said = PUBLISHED.get(gpus)
        there = f"{said:8.2f} h {HOURS_OF_8 * 8 / (said * gpus):17.0%}" if said else ""
        print(f"{gpus:4}  {gpus * PER_GPU:5}  {found:5.2f} h  {1000 * exposed:13.1f} ms  {there}".rstrip())
    print("\npublished             source            devices             minutes")
    for who, source, devices, minutes in RECORDS:
        print(f"{who:20}  {source:16}  {devices:18}  {minutes:7.1f}")


if __name__ == "__main__":
    main()
