"""The planner: the fastest layout of a model on a cluster that fits in memory."""
