"""What ranks say to each other besides the collectives of training."""
