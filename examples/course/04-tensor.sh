# Tensor and sequence parallelism: a minute. Lecture: column and row cuts, f and g, two all-reduces forward and two backward.
phalanx train examples/main.yaml --dp-replicate 1 --tp 2 train.steps=20 run.name=course-tp --fresh
# Sequence parallelism: g becomes a reduce-scatter and an all-gather; no more bytes, less activation memory.
phalanx train examples/main.yaml --dp-replicate 1 --tp 2 --sp train.steps=20 run.name=course-sp --fresh
phalanx verify examples/main.yaml --layouts tp=2 tp=2,sp=true
# Why tensor ranks stay inside a node: the same degree over NVLink, and across nodes.
phalanx predict model=llama3-8b cluster=dgx-h100:1 tp=8 sp=true train.precision=bf16 train.global_batch=8 micro_batch=1
phalanx predict model=llama3-8b cluster=dgx-h100:2 tp=16 n_kv_heads=16 sp=true train.precision=bf16 train.global_batch=8 micro_batch=1
