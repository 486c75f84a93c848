# Long sequences: a minute. Lecture: ring attention with causal load balance, Ulysses, and both.
phalanx train examples/long.yaml train.steps=10 run.name=course-ring --fresh
phalanx train examples/long.yaml train.steps=10 layout.cp_ulysses=2 run.name=course-ulysses --fresh
phalanx verify examples/long.yaml --layouts cp=2 cp=2,cp_ulysses=2 cp=4,cp_ulysses=2
phalanx predict cluster=polaris cp=4 seq_len=64 vocab_size=256 --picture context --svg context.svg
