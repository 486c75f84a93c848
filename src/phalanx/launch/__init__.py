"""Starting the processes of a run and joining them: ranks, local launcher, process group, warm pool."""
