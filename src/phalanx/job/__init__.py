"""The Job and its parts, read from YAML files and overrides. Nothing here imports torch."""
