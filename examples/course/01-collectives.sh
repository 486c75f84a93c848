# Collectives and what they cost: seconds on a laptop. Lecture: messages, bytes, latency and bandwidth.
# The naive all-reduce sends 2·D·(P−1) bytes through rank 0; a ring sends 2·D·(P−1)/P from each rank, in 2(P−1) steps.
phalanx collectives list
phalanx collectives show naive-all-reduce --ranks 4
phalanx collectives show ring-all-reduce --ranks 4 --svg ring.svg
# Divide and conquer: 8 ranks in 3 steps each way.
phalanx collectives show tree-all-reduce --ranks 8
# One tells seven friends: eight ranks have a message after three steps, naively after seven.
phalanx collectives show tree-broadcast --ranks 8
phalanx collectives show hierarchical-all-reduce --ranks 8 --group 4
# The same messages on real processes, compared with the definition.
phalanx collectives check ring-all-reduce --ranks 4
