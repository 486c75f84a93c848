"""Commands that start a job: with srun, with MPI, over a remote shell, or on this host. Nothing here imports torch."""
