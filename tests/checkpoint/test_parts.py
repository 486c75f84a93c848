"""The parts that ranks write: every element once, evenly over those that hold the same."""

import pytest
import torch

from phalanx.checkpoint.manifest import Box
from phalanx.checkpoint.parts import HeldTensor, is_finite, shares
from phalanx.config.model import ModelConfig
from phalanx.parallel.parameter_shards import ParameterShard, cut
from phalanx.partition.tensor_slices import slice_of

MODEL = ModelConfig(n_layers=1, d_model=16, n_heads=4, n_kv_heads=2, seq_len=8)
SHAPES = {
    "embed.weight": (13, 16),  # padded to equal slices
    "blocks.0.attn.wq.weight": (16, 16),
    "blocks.0.attn.wk.weight": (8, 16),  # two heads on four tensor ranks
    "blocks.0.attn.wo.weight": (16, 16),  # cut by columns
    "blocks.0.attn_norm.weight": (16,),  # whole everywhere
}
WHOLE = {name: torch.randn(shape) for name, shape in SHAPES.items()}


def state_of(replica, replicas, shard, shards, tp_rank, tp):
    """What the rank at a place of a mesh holds: like a bucket's share, a range of each flattened slice."""
    for name, shape in SHAPES.items():
        slices = tuple(slice_of(name, shape, MODEL, tp, rank) for rank in range(tp))
        flat = cut(WHOLE[name], slices[tp_rank]).reshape(-1)
        first, end = (flat.numel() * number // shards for number in (shard, shard + 1))
        value = flat[first:end].clone()
        yield HeldTensor(name, ParameterShard(name, slices, tp_rank, first, value), value, replica, replicas)


def owned(state):
    return [part for share in shares(state) for part in share.parts()]


@pytest.mark.parametrize(
    ("replicas", "shards", "tp"), [(1, 1, 1), (3, 1, 1), (1, 3, 2), (2, 1, 4), (2, 3, 4), (5, 2, 2)]
)
def test_all_ranks_together_write_every_element_once_and_equally_many_bytes(replicas, shards, tp):
    counts = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    written: dict[tuple[int, int], list[int]] = {}
    for replica in range(replicas):
        for shard in range(shards):
            for tp_rank in range(tp):
                parts = owned(state_of(replica, replicas, shard, shards, tp_rank, tp))
                written.setdefault((shard, 0), []).append(sum(part.value.nbytes for part in parts))
                for part in parts:
                    place = part.box.within(Box.of(part.shape))
                    counts[part.tensor][place] += 1
                    assert torch.equal(part.value, WHOLE[part.tensor][place])
    assert all((count == 1).all() for count in counts.values())
    row = 16 * 4
    for sizes in written.values():
        assert max(sizes) - min(sizes) <= 6 * row, (
            "three kinds of sharing, each cut at a row's end; padding is not written"
        )


def test_a_copy_on_another_rank_of_a_pipeline_is_not_written():
    [held, *_] = state_of(0, 1, 0, 1, 0, 1)
    held.shard.copy = True
    assert not owned([held])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_single_bad_element_is_found(dtype, bad):
    tensor = torch.ones(1000, dtype=dtype)
    assert is_finite(tensor)
    tensor[777] = bad
    assert not is_finite(tensor)


def test_what_is_empty_or_whole_numbers_is_finite():
    assert is_finite(torch.empty(0))
    assert is_finite(torch.arange(3))
