"""Pipeline schedules as data: what each rank does, and when; generated, validated, timed and drawn without torch."""
