#!/bin/bash
# A script of Megatron-LM, for `phalanx predict --from examples/megatron.sh cluster=dgx-h100`: GPT-3 13B on 8 nodes.
GPUS_PER_NODE=8
NNODES=${NNODES:-8}
TP=8

MODEL_ARGS=(
    --num-layers 40
    --hidden-size 5120
    --num-attention-heads 40
    --seq-length 2048
    --max-position-embeddings 2048
    --hidden-dropout 0.0
    --attention-dropout 0.0
    --tokenizer-type GPT2BPETokenizer
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 512
    --train-iters 100000
    --lr 1.0e-4
    --min-lr 1.0e-5
    --lr-decay-style cosine
    --bf16
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size $TP
    --pipeline-model-parallel-size 2
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --tp-comm-overlap
)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py \
    ${MODEL_ARGS[@]} ${TRAINING_ARGS[@]} ${PARALLEL_ARGS[@]} --data-path $1 --log-interval 10 --save-interval 1000
