"""What is submitted: batch scripts of Slurm and PBS, manifests of Kubernetes. Nothing here imports torch."""
