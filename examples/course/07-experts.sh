# Mixtures of experts: a minute. Lecture: routers, load balance, all-to-all dispatch and combine, EP × TP × FSDP.
phalanx train examples/experts.yaml train.steps=20 run.name=course-experts --fresh
phalanx verify examples/experts.yaml --layouts dp_shard=2,ep=2 dp_shard=2,tp=2,ep=2
phalanx models deepseek
