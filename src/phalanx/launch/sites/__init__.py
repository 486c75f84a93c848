"""Sites: the machines whose settings `phalanx launch` knows, one YAML file each. Nothing here imports torch."""
