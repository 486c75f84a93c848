"""Pipeline schedules as data: the order of actions on each rank; generated, validated, timed and drawn without
torch."""
