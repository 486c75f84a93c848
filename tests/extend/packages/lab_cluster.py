"""A cluster of one's own: its device, as the driver reports it, and the links of a node and between nodes."""

from phalanx import extend

DEVICE = extend.Accelerator(
    name="x900",
    bf16_tflops=400,
    fp16_tflops=400,
    fp32_tflops=50,
    ceiling=0.75,  # of the best matrix product: measure it
    memory_gib=62.5,
    bandwidth_gbs=2600,
    cores=96,
)
NODE = extend.Cluster(
    devices_per_node=4,
    accelerator=DEVICE,
    intra=extend.Link(gbs=200, latency_us=6, reached=0.8),
    inter=extend.Link(gbs=25, latency_us=12, reached=0.85),
)


def register() -> None:
    extend.device(
        "x900", extend.DeviceEntry(DEVICE, source="Example Inc., X900 data sheet", reported_as=("X900 64GB",))
    )
    extend.cluster("lab", extend.MachineEntry(NODE, source="the lab's handbook: four X900, one 200 Gb/s card each"))
