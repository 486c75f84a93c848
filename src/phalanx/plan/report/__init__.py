"""What a plan says: why, alternatives, rules of thumb."""
