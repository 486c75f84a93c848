"""Silent corruption, loss spikes and NaN: found before the optimizer writes, and answered by a policy."""
