"""Every rule of legality: all problems at once, with the nearest legal choice."""
