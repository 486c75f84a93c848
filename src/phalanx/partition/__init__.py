"""What each rank holds: batch equation, stages and cuts, tensor slices, sequence parts, experts, recomputation per
layer."""
