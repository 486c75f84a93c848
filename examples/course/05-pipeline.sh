# Pipelines: a minute. Lecture: naive, GPipe, 1F1B, interleaved, zero-bubble, DualPipe: the bubble and activations in flight.
for schedule in naive gpipe 1f1b interleaved_1f1b zb_h1 zb_v dualpipe_v; do
    phalanx schedule show $schedule --stages 4 --microbatches 8
done
# A larger batch fills the pipeline: Narayanan et al. 2021, figure 17 (with and without recomputation) and figure 16 (micro-batches).
phalanx predict model=gpt3-175b n_layers=80 cluster=dgx-a100:16 tp=8 pp=16 precision=fp16 micro_batch=1 dropout=0.1 schedule=gpipe \
    --framework megatron-2021 --sweep train.global_batch=1,4,16,32,64,128,256 recompute=none,full --svg batch.svg
phalanx predict model=gpt3-175b n_layers=48 cluster=dgx-a100:8 tp=8 pp=8 precision=fp16 recompute=full train.global_batch=512 \
    --framework megatron-2021 --sweep train.global_batch=128,512 micro_batch=1,2,4,8
# 64 devices as 4 x 4 x 4.
phalanx predict model=gpt3-175b n_layers=48 d_model=8192 n_heads=64 cluster=dgx-a100:8 tp=4 pp=4 dp_replicate=4 precision=bf16 \
    recompute=full micro_batch=1 train.global_batch=16 --sweep train.global_batch=16,64,256,1024
# The picture becomes a program: it runs as drawn, and equals one process.
phalanx train examples/pipeline.yaml train.steps=20 run.name=course-pipeline --fresh
phalanx verify examples/pipeline.yaml --layouts pp=2,schedule=gpipe,accumulation=4 pp=2,schedule=1f1b,accumulation=4 \
    pp=2,schedule=zb_v,accumulation=4
# PipeDream as first published: a version of the weights per micro-batch in flight, an update for each.
phalanx verify examples/pipeline.yaml clip=0 tied=false --layouts pp=2,schedule=pipedream_stash,accumulation=4
# TeraPipe's slices: the best cut is uneven, since later slices attend to more keys.
phalanx predict model=llama3-8b cluster=dgx-h100:1 pp=8 micro_batch=1 train.global_batch=4 precision=bf16 \
    model.seq_len=32768 schedule=terapipe recompute=full
# A straggler: every rank waits for it.
phalanx simulate model=llama3-8b cluster=a100-pcie:2 tp=2 sp=true pp=4 dp_shard=2 zero=1 layout.schedule=zb_h1 \
    micro_batch=1 train.global_batch=16 train.precision=bf16 --straggler 2=1.2 --svg straggler.svg
