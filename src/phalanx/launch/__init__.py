"""Starts the processes of a run and joins them: ranks, local launcher, process group, warm pool."""
