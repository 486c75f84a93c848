"""The example of FSDP with tensor parallelism takes ezpz's options, and keeps four processes busy at every degree."""

from pathlib import Path

import pytest

from phalanx.check.load import load_file

JOB = Path(__file__).parents[2] / "examples" / "fsdp_tp.yaml"


@pytest.mark.parametrize(("tp", "dp_shard"), [(1, 4), (2, 2), (4, 1)])
def test_fsdp_shards_over_the_devices_that_tensor_parallelism_leaves(tp, dp_shard):
    job = load_file(JOB, [f"--tp={tp}"]).job
    assert (job.layout.dp_shard, job.layout.processes, job.layout.zero) == (dp_shard, 4, 3)


def test_it_is_a_llama_with_grouped_queries():
    model = load_file(JOB).job.model
    assert (model.norm, model.activation, model.positions, model.bias) == ("rmsnorm", "swiglu", "rope", False)
    assert model.kv_heads < model.n_heads


def test_ezpz_s_command_line():
    loaded = load_file(JOB, ["--tp=4", "--n-layers=8", "--dataset", "random"])
    job = loaded.job
    assert (job.layout.tp, job.model.n_layers, job.data.corpus) == (4, 8, "random")
    assert loaded.answers == ["--dataset random: taken as data.corpus=random"]
    assert load_file(JOB, ["--dataset", "shakespeare"]).job.data.corpus == "shakespeare_char"
