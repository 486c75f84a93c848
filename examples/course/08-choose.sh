# Choosing a layout: seconds. Lecture: rules of thumb, roofline, automatic search, published layouts.
# What each way to cut a model waits for, sends and holds.
phalanx predict model=llama3-8b cluster=dgx-h100 precision=bf16 train.global_batch=64 recompute=full micro_batch=1 \
    --sweep "layout=dp_replicate=8;dp_shard=8,zero=1;dp_shard=8,zero=3;tp=8,sp=true;pp=8;cp=8"
phalanx plan model=llama3-8b cluster=dgx-h100:1 train.global_batch=64 train.precision=bf16 --html plan.html
# Slow links: the plan changes.
phalanx plan model=llama3-8b cluster=a100-pcie:2 train.global_batch=64 train.precision=bf16
# One device, where nothing fits without offload or tiles.
phalanx plan model=llama3-8b cluster=dgx-h100 cluster.devices_per_node=1 train.global_batch=8 train.precision=bf16
# Llama 3 405B as published: 8,192 GPUs, TP 8, PP 16 (here 16 × 8 × 64).
phalanx predict model=llama3-405b cluster=dgx-h100:1024 tp=8 sp=true pp=16 dp_shard=64 schedule=interleaved_1f1b pp_chunks=4 \
    zero=2 train.precision=bf16 train.global_batch=2048 micro_batch=1 || test $? -eq 3
