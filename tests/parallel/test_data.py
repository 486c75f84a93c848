"""Data parallelism equals one process, in float64 to 1e-9: processes, threads, accumulation, dropout."""

import pytest
import torch

from phalanx.config.job import Job, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.model.seeding import Noise
from phalanx.model.transformer import Transformer
from phalanx.parallel.apply import apply
from phalanx.parallel.mesh import build
from phalanx.parallel.objective import MicroTensors
from phalanx.parallel.pipeline import Pipeline
from phalanx.parallel.zero import BucketReplica

VOCAB, SEQ, BATCH, SEED = 11, 8, 12, 5


def gradients(ranks, layout: Layout, accumulation: int, dropout: float = 0.0, tied: bool = True):
    """The loss sum of this rank and the whole gradient, after one step over 12 samples."""
    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (BATCH, SEQ + 1))
    tokens[3, 5:] = -100  # ignored targets: the ranks have different numbers of valid tokens
    inputs, targets = tokens[:, :-1].clamp(min=0), tokens[:, 1:]
    valid = int((targets != -100).sum())
    shape = ModelConfig(n_layers=2, d_model=16, n_heads=2, seq_len=SEQ, dropout=dropout, tied=tied)
    with torch.device("meta"):
        model = Transformer(shape, VOCAB).double()
    mesh = build(layout, "cpu")
    train = Train(seed=SEED)
    replica = apply(model, Job(model=shape, layout=layout, train=train), mesh, torch.device("cpu"))
    mine = range(mesh.data_rank * BATCH // mesh.data_ranks, (mesh.data_rank + 1) * BATCH // mesh.data_ranks)
    size = len(mine) // accumulation
    loss = torch.zeros((), dtype=torch.float64)
    for k in range(accumulation):
        ids = list(mine[k * size : (k + 1) * size])
        noise = Noise(SEED, 0, ids) if dropout else None
        micro = MicroTensors(inputs[ids], targets[ids], noise)
        loss += replica.forward_backward(micro, 1 / valid, last=k == accumulation - 1)
    return loss, {f.name: f.gradient.clone() for f in replica.shards if f.gradient is not None}


@pytest.fixture(scope="module")
def reference(ranks):
    return {(d, tied): ranks(gradients, 1, Layout(), 1, d, tied)[0] for d in (0.0, 0.3) for tied in (True, False)}


@pytest.mark.parametrize(
    ("layout", "accumulation", "dropout", "tied"),
    [
        (Layout(dp_replicate=2), 1, 0.0, True),
        (Layout(dp_replicate=2), 3, 0.0, False),
        (Layout(dp_replicate=3), 2, 0.3, True),
        (Layout(dp_replicate=4), 1, 0.3, False),
        (Layout(dp_replicate=4, bucket_mb=0.001), 3, 0.0, True),
        (Layout(), 4, 0.3, True),
        (Layout(dp_replicate=3, data_parallel="threads"), 1, 0.0, True),
        (Layout(dp_replicate=2, data_parallel="threads"), 3, 0.3, False),
    ],
    ids=str,
)
def test_equals_one_process(ranks, reference, layout, accumulation, dropout, tied):
    expected_loss, expected = reference[dropout, tied]
    results = ranks(gradients, layout.processes, layout, accumulation, dropout, tied)
    torch.testing.assert_close(sum(loss for loss, _ in results), expected_loss, rtol=1e-9, atol=0)
    for _, found in results:
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12)


def buckets_of_stages(ranks, layout: Layout):
    """By bucket: the stages whose it is alone (as the replica knows them), and of each parameter in it those that
    compute with it."""
    shape = ModelConfig(n_layers=4, d_model=16, n_heads=2, seq_len=SEQ)
    with torch.device("meta"):
        model = Transformer(shape, VOCAB).double()
    mesh = build(layout, "cpu")
    job = Job(model=shape, layout=layout, train=Train(global_batch=4))
    replica = apply(model, job, mesh, torch.device("cpu"))
    assert isinstance(replica, BucketReplica)
    assert isinstance(replica.runner, Pipeline)
    stages = replica.runner.stages
    return [
        (
            [stage for stage, owned in replica.of_stage.items() if bucket in owned],
            {slot.name: stages.users(slot.name) for slot in bucket.slots},
        )
        for bucket in replica.buckets
    ]


@pytest.mark.parametrize("data", [{"dp_replicate": 2}, {"dp_shard": 2, "zero": 2}], ids=str)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zb_v"])
def test_a_bucket_belongs_to_one_stage_or_waits_for_all(ranks, schedule, data):
    layout = Layout(pp=2, schedule=schedule, accumulation=2, bucket_mb=0.003, **data)
    for rank, buckets in enumerate(ranks(buckets_of_stages, 4, layout)):
        names = [name for _, users in buckets for name in users]
        assert len(names) == len(set(names))
        for alone, users in buckets:
            (stages,) = {tuple(stages) for stages in users.values()}  # the same of every parameter
            assert alone == (list(stages) if len(stages) == 1 else [])
        both_ends = [users for alone, users in buckets if not alone]
        # The V brings both ends of the model, and with them the tied embedding, to its first rank.
        assert both_ends == ([{"embed.weight": [0, 3]}] if schedule == "zb_v" and rank < 2 else [])
