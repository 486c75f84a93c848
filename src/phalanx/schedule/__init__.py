"""Pipeline schedules as data, each rank's order of actions: generated, validated, timed and drawn without torch."""
