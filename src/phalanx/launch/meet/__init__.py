"""How the ranks of srun, mpiexec and PALS find each other without being told where."""
