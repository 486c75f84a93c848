"""The report of a plan: reasons, alternatives, rules of thumb."""
