"""The job and its parts as frozen dataclasses; presets, clusters, devices; YAML and overrides, with their origins."""
