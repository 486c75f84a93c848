# Launching: seconds. Lecture: Slurm, PBS, MPI, Kubernetes; ranks, logs, a test of the ranks. Nothing is submitted.
phalanx doctor examples/main.yaml || test $? -eq 1
phalanx test-dist examples/main.yaml --quick --html test.html
phalanx launch examples/main.yaml --launcher local --dry-run
phalanx launch examples/main.yaml --submit slurm --nnodes 2 --time 2h --dry-run
phalanx launch examples/main.yaml --submit k8s --nnodes 2 --image registry.example.org/phalanx:1 --pvc shared --dry-run
