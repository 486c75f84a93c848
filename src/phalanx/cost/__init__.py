"""What a model under a layout costs: FLOPs, memory, traffic and time. Nothing here imports torch."""
