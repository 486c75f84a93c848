# Tensor and sequence parallelism: a minute. Lecture: column and row cuts, f and g, two all-reduces forward and two backward.
phalanx train examples/main.yaml --dp-replicate 1 --tp 2 train.steps=20 run.name=course-tp --fresh
# Sequence parallelism: g becomes a reduce-scatter and an all-gather; no more bytes, less activation memory.
phalanx train examples/main.yaml --dp-replicate 1 --tp 2 --sp train.steps=20 run.name=course-sp --fresh
phalanx verify examples/main.yaml --layouts tp=2 tp=2,sp=true
# Why tensor ranks stay inside a node: the same degree over NVLink, and across nodes.
phalanx predict model=llama3-8b cluster=dgx-h100:1 tp=8 sp=true train.precision=bf16 train.global_batch=8 micro_batch=1
phalanx predict model=llama3-8b cluster=dgx-h100:2 tp=16 n_kv_heads=16 sp=true train.precision=bf16 train.global_batch=8 micro_batch=1
# Tiles: matrix products are cut into tiles of 64 to 256; a vocabulary of 50,257 leaves every row misaligned, 50,304 does not.
phalanx predict model=gpt2 cluster=dgx-a100 cluster.devices_per_node=1 precision=bf16 train.global_batch=16 --sweep vocab_size=50257,50304
# Coalesced loads: the same count of numbers, ever farther apart.
python examples/coalesced.py strides.svg
# Two slow nodes, and 32 nodes joined by NVLink switches: the same 16 tensor ranks on three SuperPods.
phalanx predict model=llama3-70b cluster=dgx-h100:32 precision=bf16 train.global_batch=256 micro_batch=1 tp=16 sp=true n_kv_heads=16 \
    dp_shard=16 zero=1 recompute=full --sweep cluster=dgx-a100:32,dgx-h100:32,dgx-h100-nvl256:32
