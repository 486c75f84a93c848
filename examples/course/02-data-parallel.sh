# Data parallelism: about a minute. Lecture: DataParallel and DDP, summed gradients, accumulation, BSP and ASP, local SGD.
# The worked example: one item per step, two accumulated, two ranks; the numbers can be checked by hand.
python examples/worked_example.py
# DDP on two processes. The log names the buckets; its end counts the all-reduced bytes.
phalanx train examples/main.yaml train.steps=20 run.name=course-ddp --fresh
# One process with a thread per replica (torch's DataParallel): the interpreter's lock makes it slower.
phalanx train examples/main.yaml train.steps=20 layout.data_parallel=threads run.name=course-threads --fresh
# The same global batch in twice as many micro-batches, summed once per step.
phalanx train examples/main.yaml train.steps=20 layout.accumulation=2 run.name=course-accumulated --fresh
# Without a barrier every step: replicas that average every ten steps, and stale gradients.
phalanx train examples/main.yaml train.steps=20 layout.sync=local_sgd layout.sync_every=10 run.name=course-local --fresh
phalanx train examples/main.yaml train.steps=20 layout.sync=asp run.name=course-asp --fresh
# Twice the devices, half the time, as long as each has work: one node to 64, the same batch. The tables of ImageNet in 29 hours, 1 hour
# and minutes are this curve; a batch that grows instead needs a larger learning rate (optimizer.batch_scaling).
phalanx predict model=gpt2-xl cluster=dgx-a100 dp_replicate=-1 precision=bf16 train.global_batch=512 --sweep cluster.nodes=1,2,4,8,16,32,64
