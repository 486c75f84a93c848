"""The cost model of a layout: FLOPs, memory, traffic and time. Nothing here imports torch."""
