# Sharded state: about a minute. Lecture: ZeRO-1, -2, -3, FSDP, HSDP: memory and bytes, and what fits on a node.
# 16 bytes per parameter: mixed-precision Adam keeps 2 + 2 + 12. Each stage shards one more part.
for stage in 1 2 3; do
    phalanx predict model=llama3-8b cluster=dgx-a100 dp_shard=8 zero=$stage recompute=full train.precision=bf16 \
        train.global_batch=8 || test $? -eq 3   # exit code 3: it does not fit, and the message says what would
done
# The largest model that fits on eight devices of 80 GB, by stage and by what state is kept.
phalanx predict dp_shard=8 precision=bf16 --largest 80
# The same on this machine: bytes per step, and results equal to one process in float64.
phalanx train examples/main.yaml --dp-replicate 1 --dp-shard 2 --zero 1 train.steps=20 run.name=course-zero1 --fresh
phalanx train examples/main.yaml --dp-replicate 1 --dp-shard 2 --zero 3 train.steps=20 run.name=course-zero3 --fresh
phalanx verify examples/main.yaml --layouts dp_shard=2,zero=1 dp_shard=2,zero=2 dp_shard=2,zero=3 dp_replicate=2,dp_shard=2
