# Failures: a minute. Lecture: checkpoints, the Llama 3 interruption table, productive time, silent corruption.
# 419 interruptions in 54 days on 16,384 GPUs are 0.000474 per device and day.
phalanx simulate model=llama3-8b cluster=dgx-h100:128 dp_shard=1024 train.global_batch=1024 train.precision=bf16 \
    --failures-per-device-day 0.000474 --checkpoint-s 30 --restart-s 600
# The table by cause: what each loses, and what each remedy brings.
phalanx goodput
# A run that is stopped resumes to the bit, also in another layout.
phalanx train examples/main.yaml train.steps=20 checkpoint.every=10 run.name=course-survive --fresh
phalanx train examples/main.yaml train.steps=40 checkpoint.every=10 run.name=course-survive --dp-replicate 1 --dp-shard 2
phalanx checkpoint list runs/course-survive
phalanx checkpoint verify runs/course-survive
