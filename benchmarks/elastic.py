"""Minutes for 3,000 steps of 64 simulated ranks with injected failures: replicas that come and go beside restarts from
checkpoints.

Eight nodes of eight ranks, a replica each; a node fails every 2,700 to 4,500 s, a checkpoint every 100 steps: the
settings of Clockwork's comparison on 64 H200 (clockwork.io, Keeping Distributed Training Running Through Failures,
2026), which took 405 minutes by moving ranks to spares (TorchPass), 818 by restarts and 930 with torchft. A step takes
8 s, 400 minutes for all of them without failures; how long a node was away is not said, so it is varied. Who takes part
in a step is decided by the run's own ReplicaMembers; time is simulated.

python -m benchmarks.elastic [--seeds 20]
"""

from __future__ import annotations

import argparse
import random
import statistics

from benchmarks.report import machine, save
from phalanx.launch.replicas import RankMessage, ReplicaMembers, ReplicaTerms

STEPS, STEP_S, SAVED_EVERY = 3000, 8.0, 100
REPLICAS, RANKS = 8, 8
GAP_S = (2700.0, 4500.0)
"""Seconds between failures."""
COPY_S = 30.0
"""Seconds for which all wait while a replica copies the state, 1.3 TB by 8 ranks at 5 GB/s each."""
AWAY_S = (60.0, 300.0, 1440.0)
"""Seconds until a failed node trains again; with 24 minutes restarts take about as long as Clockwork's."""


def by_restarts(random: random.Random, away_s: float) -> float:
    """Returns the seconds of a run that goes back to its newest checkpoint after a failure."""
    now, step, failure = 0.0, 0, random.uniform(*GAP_S)
    while step < STEPS:
        now += STEP_S
        if now < failure:
            step += 1
            continue
        now, step = failure + away_s, step - step % SAVED_EVERY
        failure += random.uniform(*GAP_S)  # longer than any node is away
    return now


def by_replicas(random: random.Random, away_s: float) -> float:
    """Returns the seconds of a run whose other replicas go on, with the whole batch."""
    now, failure, back = 0.0, random.uniform(*GAP_S), dict[int, float]()
    members = ReplicaMembers(ReplicaTerms(REPLICAS, 1), RANKS, lambda: now)

    def come(replica: int, ready: int) -> None:
        for rank in range(RANKS):
            members.enter((replica, rank), RankMessage(ready=ready))

    def vote(*, summed: bool) -> None:
        message = RankMessage(epoch=members.notice.epoch, step=members.notice.step, summed=summed)
        for replica in list(members.alive):
            for rank in range(RANKS):
                members.vote((replica, rank), message)
        assert members.decide()

    for replica in range(REPLICAS):
        come(replica, 0)
    assert members.decide()
    while members.notice.step < STEPS:
        took = STEP_S * REPLICAS / len(members.alive)
        if now + took >= failure:
            lost = random.choice(members.alive)
            now, back[lost] = failure, failure + away_s
            assert members.leave(lost)
            vote(summed=False)
            failure += random.uniform(*GAP_S)
            continue
        now += took
        come_back = [each for each, when in back.items() if when <= now]
        for replica in come_back:
            come(replica, -1)
            del back[replica]
        vote(summed=True)
        now += COPY_S * bool(come_back)
    return now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    options, _ = parser.parse_known_args()
    ways = {"restarts from checkpoints": by_restarts, "replicas that come and go": by_replicas}
    minutes = {
        f"{away_s:g}": {
            name: [way(random.Random(seed), away_s) / 60 for seed in range(options.seeds)] for name, way in ways.items()
        }
        for away_s in AWAY_S
    }
    least = STEPS * STEP_S / 60
    table = [("a failed node is away for", *(f"{name}: minutes (productive)" for name in ways))]
    for away_s, of in minutes.items():
        medians = [statistics.median(of[name]) for name in ways]
        table.append((f"{float(away_s) / 60:g} min", *(f"{each:.0f} ({least / each:.0%})" for each in medians)))
    result = {"benchmark": "elastic", "machine": machine(), "minutes": minutes}
    note = f"{STEPS:,} steps without a failure: {least:.0f} minutes. Median of {options.seeds} seeds; simulated time."
    save("elastic", result, table, "64 ranks with failures", note)


if __name__ == "__main__":
    main()
