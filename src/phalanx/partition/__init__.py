"""The contents of each rank: batch equation, stages and cuts, tensor slices, sequence parts, experts, recomputation."""
