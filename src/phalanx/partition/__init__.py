"""Who holds what: batch equation, stages and cuts, tensor slices, sequence parts, experts, recomputation by layer."""
