"""A simulated step against closed forms, against what is predicted without simulation, and against itself."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.config.job import Optimizer
from phalanx.config.model import ModelConfig
from phalanx.config.presets import PRESETS
from phalanx.cost.communication import boundary_seconds
from phalanx.cost.frameworks import FRAMEWORKS, PHALANX
from phalanx.cost.held import contents
from phalanx.cost.prediction import predict
from phalanx.cost.rank_time import held_by
from phalanx.cost.spec import Framework, StepSpec
from phalanx.cost.step_state import duplicated_stages_seconds, optimizer_seconds, state_seconds
from phalanx.errors import JobError
from phalanx.partition.derived import schedule_of
from phalanx.schedule import catalogue, file
from phalanx.simulate.step import Disturbance, check, figures, rank_seconds, simulate, stage_time, step_seconds
from simulate.specs import spec

MEGATRON_2021, MEGATRON_CORE = FRAMEWORKS["megatron-2021"], FRAMEWORKS["megatron-core"]

DATA = ("dp_shard=64", "dp_shard=8,dp_replicate=8", "dp_shard=64,reshard=false", "dp_shard=8,tp=8,sp=true")
SHARED = ("dp_replicate=64", "dp_shard=64,zero=1", "dp_shard=64,zero=2", "dp_shard=8,dp_replicate=8,zero=2")
PIPE = "tp=8,sp=true,pp=4,dp_shard=2,zero=1"


def predicted(one: StepSpec) -> float:
    return predict(one).step_time_s


def alike(layers: int, framework: Framework = MEGATRON_CORE, **axes: int) -> StepSpec:
    """A pipeline whose ranks do the same: next to no vocabulary, so that embedding and head are nothing."""
    one = spec(f"pp=4,tp={axes.pop('tp', 1)}", axes.pop("m", 8), framework=framework)
    return replace(one, model=replace(one.model, n_layers=layers, vocab_size=2), stages=())


@pytest.mark.parametrize("m", [1, 2, 16])
@pytest.mark.parametrize("line", DATA)
def test_without_a_pipeline_it_is_the_prediction_where_parameters_are_shared(line: str, m: int) -> None:
    one = spec(line, m, "llama3-8b")
    assert simulate(one).seconds == pytest.approx(predicted(one), rel=1e-9)


@pytest.mark.parametrize("m", [1, 2, 16])
@pytest.mark.parametrize("line", [*DATA, *SHARED])
def test_without_a_pipeline_it_is_the_prediction_where_nothing_overlaps(line: str, m: int) -> None:
    one = spec(line, m, "llama3-8b", framework=MEGATRON_2021)
    assert simulate(one).seconds == pytest.approx(predicted(one), rel=1e-9)


@pytest.mark.parametrize("m", [1, 2, 16])
@pytest.mark.parametrize("line", SHARED)
@pytest.mark.parametrize("framework", [PHALANX, MEGATRON_CORE])
def test_without_a_pipeline_it_is_the_prediction_but_for_a_block_s_collectives(
    line: str, m: int, framework: Framework
) -> None:
    """The prediction takes what is late of gathering and reducing together, and the edges of both, and of these the
    longer; the simulation what is longer of each. And it lets collectives slow down passes only while both are there,
    the prediction all of the time that they can be hidden."""
    one = spec(line, m, "llama3-8b", framework=framework)
    content = contents(one)[0]
    state = state_seconds(one, held_by(one, content), round(content.blocks / 4))
    block = (state.gather + state.reduce) / content.blocks
    slower = rank_seconds(one, catalogue.build("1f1b", 1, m), 0, Disturbance()).interference_factor
    assert abs(simulate(one).seconds - predicted(one)) <= block * (1 + slower)


@pytest.mark.parametrize("m", [1, 3, 8])
def test_1f1b_of_equal_ranks_has_its_closed_form(m: int) -> None:
    """(p - 1)(F + B) + m(F + B), messages on the way in and out, and the state."""
    one = alike(16, m=m)
    content = contents(one)[1]
    work = stage_time(one, content).total
    state = optimizer_seconds(one, held_by(one, content), content)
    found = simulate(one)
    # Messages that nothing hides: in and out; of one that its receiver waits for in the steady state, part of it.
    messages = 2 * 3 * boundary_seconds(one, 0, 1)
    passes = (3 + m) * work
    assert passes + messages <= (found.seconds - state) * 1.002
    assert found.seconds - state == pytest.approx(passes + messages, rel=5e-3)


@pytest.mark.parametrize("framework", [PHALANX, MEGATRON_CORE])
@pytest.mark.parametrize(
    "line",
    [
        PIPE,
        "tp=8,sp=true,pp=8,recompute=full",
        "tp=4,sp=true,pp=4,dp_replicate=4",
        "pp=16,tp=4,recompute=selective",
        "tp=8,sp=true,pp=4,dp_shard=2",
        "tp=8,sp=true,pp=2,dp_shard=2,cp=2,zero=1",
        *(
            f"{PIPE},schedule={name}"
            for name in (
                "gpipe",
                "interleaved_1f1b",
                "interleaved_1f1b,pp_chunks=5",
                "looped_bfs",
                "zb_h1",
                "zb_h2",
                "zb_v",
                "v_half",
                "dualpipe_v",
                "dualpipe",
                "terapipe",
                "pipedream",
            )
        ),
    ],
)
def test_a_pipeline_takes_what_is_predicted(line: str, framework: Framework) -> None:
    one = spec(line, 32, framework=framework)
    assert step_seconds(one) == pytest.approx(predicted(one), rel=0.02)


@pytest.mark.parametrize(
    ("line", "m"),
    [
        ("pp=8,dp_shard=32,ep=32,zero=1", 32),
        ("pp=8,dp_shard=32,ep=32,zero=1,schedule=dualpipe", 32),
        ("pp=4,dp_shard=16,ep=16,zero=1,schedule=zb_v,recompute=full", 16),
    ],
)
def test_a_pipeline_of_experts_takes_what_is_predicted(line: str, m: int) -> None:
    one = spec(line, m, "deepseek-v3", "h800:32")
    assert step_seconds(one) == pytest.approx(predicted(one), rel=0.02)


@pytest.mark.parametrize(
    "line",
    [
        PIPE,
        "tp=8,pp=8,recompute=full",
        "tp=4,pp=4,dp_replicate=4",
        f"{PIPE},schedule=interleaved_1f1b",
        f"{PIPE},schedule=interleaved_1f1b,pp_chunks=5",
        f"{PIPE},schedule=gpipe",
    ],
)
def test_a_program_that_overlaps_nothing_takes_what_is_predicted(line: str) -> None:
    one = spec(line, 32, framework=MEGATRON_2021)
    assert step_seconds(one) == pytest.approx(predicted(one), rel=0.03)
    assert step_seconds(one) > step_seconds(replace(one, framework=replace(MEGATRON_2021, pp_overlaps=True)))


@st.composite
def pipelines(draw: st.DrawFn) -> StepSpec:
    """Pipelines with even stages, and with such as nobody would cut."""
    name = draw(st.sampled_from(sorted(catalogue.SCHEDULES)))
    pp = draw(st.sampled_from([2, 3, 4, 8]))
    framework = draw(st.sampled_from([PHALANX, MEGATRON_CORE, MEGATRON_2021]))
    stages, layers = catalogue.stages(name, pp), PRESETS["llama3-70b"].n_layers
    cut = ""
    if draw(st.booleans()):
        ends = sorted(draw(st.sets(st.integers(1, layers - 1), min_size=stages - 1, max_size=stages - 1)))
        cut = ",pp_cut=" + "+".join(str(b - a) for a, b in itertools.pairwise([0, *ends, layers]))
    return spec(f"tp=8,sp=true,pp={pp},schedule={name}{cut}", draw(st.integers(pp, 400)), framework=framework)


@settings(max_examples=80, derandomize=True)
@given(pipelines())
def test_a_long_step_is_a_short_one_and_more_of_the_same(one: StepSpec) -> None:
    # Mostly to 1e-12; where two ranks are nearly as slow, what the first micro-batches hide lasts longer than that.
    assert abs(step_seconds(one) / figures(simulate(one)).step_time_s - 1) <= 1e-3, one.layout.line()


@settings(max_examples=30, derandomize=True)
@given(pipelines())
def test_every_moment_of_a_rank_is_accounted_for(one: StepSpec) -> None:
    one = replace(one, batch=replace(one.batch, accumulation=min(one.batch.accumulation, 12)))
    found = simulate(one)
    for rank in range(one.layout.pp):
        parts = found.shares(rank)
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(found.seconds)
        spans = found.device[rank]
        assert all(a.end <= b.start * (1 + 1e-12) + 1e-12 for a, b in itertools.pairwise(spans))
        assert spans[-1].end <= found.seconds * (1 + 1e-12)


@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("factor", [1.5, 3.0])
def test_a_slow_rank_sets_the_pace(rank: int, factor: float) -> None:
    """1F1B with one rank that takes `factor` times as long: m of its micro-batches, the way to it and back through the
    ranks before, and what of the way through those after its own next forward passes do not fill."""
    m, p, one = 24, 4, alike(16, m=24)
    disturbed = Disturbance(slow=((rank, factor),))
    time = stage_time(one, contents(one)[1])
    after = (p - 1 - rank) * max(0.0, time.total - factor * time.forward_seconds)
    expected = m * factor * time.total + rank * time.total + after
    slow, well = simulate(one, disturbed), simulate(one)
    assert slow.seconds == pytest.approx(expected, rel=0.01)
    assert slow.seconds / well.seconds == pytest.approx(expected / ((m + p - 1) * time.total), rel=0.01)
    assert step_seconds(one, disturbed) == pytest.approx(slow.seconds, rel=1e-3)
    idle = [slow.shares(each).idle for each in range(4)]
    assert idle.pop(rank) < min(idle)


def test_a_slow_link_slows_the_messages_between_two_ranks() -> None:
    one = spec("tp=8,pp=4", 8, framework=MEGATRON_CORE)
    well, slow = simulate(one), simulate(one, Disturbance(links=(((1, 2), 50.0),)))
    hop = boundary_seconds(one, 0, 1)
    for timeline, factor in ((well, 1.0), (slow, 50.0)):
        for rank in range(4):
            sent = {span.to: span.seconds for span in timeline.network[rank] if span.kind == "send"}
            for to, seconds in sent.items():
                assert seconds == pytest.approx(hop * (factor if {rank, to} == {1, 2} else 1))
    # On the way in and on the way out it is in nobody's shadow.
    assert slow.seconds - well.seconds >= 2 * 49 * hop * 0.999
    assert slow.seconds - well.seconds <= 2 * 49 * hop * (8 + 1)


def test_only_stages_in_different_nodes_send_over_the_network() -> None:
    """Stages of four devices, two to a node of eight: the network is between the second and the third."""
    one = spec("tp=4,pp=4", 8, framework=MEGATRON_CORE)
    near, far, again = (boundary_seconds(one, rank, rank + 1) for rank in range(3))
    assert near == again < far / 4
    simulated = simulate(one)
    assert {span.seconds for span in simulated.network[1] if span.to == 2} == {far}
    assert predict(one).parts.exposed["pp"] == pytest.approx(2 * (2 * near + far))


def test_slow_collectives_slow_what_they_are_part_of() -> None:
    whole = spec("dp_shard=8,dp_replicate=8", 2, "llama3-8b", framework=MEGATRON_2021)
    well, slow = step_seconds(whole), step_seconds(whole, Disturbance(axes=(("dp", 4.0),)))
    exposed = predict(whole).parts.exposed["dp_shard"]
    assert slow - well == pytest.approx(3 * exposed, rel=0.02)
    assert step_seconds(whole, Disturbance(axes=(("tp", 4.0), ("cp", 4.0), ("ep", 4.0)))) == pytest.approx(well)
    tensor = spec("tp=8,sp=true", 2, "llama3-8b", framework=MEGATRON_CORE)
    more = step_seconds(tensor, Disturbance(axes=(("tp", 2.0),))) - step_seconds(tensor)
    assert more == pytest.approx(predict(tensor).parts.exposed["tp"], rel=0.05)


def test_no_disturbance_is_none() -> None:
    one = spec(PIPE, 8)
    same = Disturbance(slow=((1, 1.0),), links=(((0, 1), 1.0),), axes=(("dp", 1.0), ("tp", 1.0)))
    assert simulate(one, same).seconds == pytest.approx(simulate(one).seconds, rel=1e-12)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("dp_replicate=4,sync=asp", "layout.sync: asp replicas do not synchronise"),
        ("dp_replicate=4,sync=diloco", "layout.sync: diloco"),
        ("dp_replicate=4,data_parallel=threads", "layout.data_parallel: threads"),
    ],
)
def test_what_has_no_step_is_refused(line: str, message: str) -> None:
    for refuses in (simulate, step_seconds):
        with pytest.raises(JobError, match=message):
            refuses(spec(line, 1, "llama3-8b"))


def test_everything_that_a_case_does_not_have_is_told_at_once() -> None:
    one = spec("tp=8,pp=4", 8)
    check(Disturbance(slow=((3, 1.5),), links=(((2, 3), 4.0),), axes=(("tp", 2.0),)), one)
    wrong = Disturbance(
        slow=((4, 1.5), (0, 0.0)), links=(((1, 1), 2.0), ((2, 7), 2.0)), axes=(("pp", 3.0), ("tp", -1.0), ("dp", 2.0))
    )
    with pytest.raises(JobError) as error:
        check(wrong, one)
    assert len(error.value.problems) == 7
    for words in (
        "--straggler 4=1.5: pipeline ranks are 0 to 3",
        "--slow-link 1-1=2: pipeline ranks are 0 to 3; a link joins two of them",
        "--slow-link 2-7=2",
        "--slow-link pp=3: axes are tp, cp, ep, dp; between pipeline ranks: 2-3=3",
        "--slow-link dp=2: the layout has one rank along dp",
        "--straggler 0=0: the factor must be more than 0",
        "--slow-link tp=-1: the factor must be more than 0",
    ):
        assert words in str(error.value)
    with pytest.raises(JobError, match="the pipeline has rank 0 alone"):
        check(Disturbance(slow=((1, 2.0),)), spec("dp_shard=8", 1, "llama3-8b"))


def test_a_schedule_of_ones_own_is_simulated_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(file.text(catalogue.build("zb_h1", 4, 8)))
    named, own = spec("tp=8,pp=4,schedule=zb_h1", 8), spec(f"tp=8,pp=4,schedule={path}", 8)
    assert simulate(own).seconds == pytest.approx(simulate(named).seconds)
    assert step_seconds(own) == pytest.approx(simulate(own).seconds)


def test_slices_of_a_sequence_fill_the_pipeline_sooner() -> None:
    one, cut = spec(PIPE, 4), spec(f"{PIPE},schedule=terapipe", 4)
    sends = [span for span in simulate(cut).network[0] if span.kind == "send"]
    assert len(sends) == 4 * 4
    assert all(span.seconds == pytest.approx(boundary_seconds(one, 0, 1) / 4) for span in sends)
    assert simulate(cut).seconds < simulate(one).seconds


def test_both_directions_of_dualpipe_are_there() -> None:
    found = simulate(spec("tp=8,pp=4,schedule=dualpipe", 8))
    for rank in range(4):
        stages = {span.stage for span in found.device[rank] if span.kind == "F"}
        assert stages == {rank, 3 - rank}


@pytest.mark.parametrize("pp", [4, 5])
def test_both_copies_of_a_stage_add_up_their_gradients_before_the_optimizer(pp: int) -> None:
    one = spec(f"tp=8,pp={pp},schedule=dualpipe", 10)
    found = simulate(one)
    for rank in range(pp):
        last = [span for span in found.network[rank] if span.kind == "reduce" and span.stage < 0]
        whole = held_by(one, contents(one)[rank])
        assert [span.seconds for span in last] == (
            [] if 2 * rank == pp - 1 else [duplicated_stages_seconds(one, whole)]
        )
        assert all(span.end <= found.device[rank][-1].start + 1e-12 for span in last)
    assert not any(span.stage < 0 for span in simulate(spec("tp=8,pp=4", 8)).network[0] if span.kind == "reduce")


def test_without_a_flush_figures_are_a_step_s() -> None:
    """Two steps, one fill: a step has half of the bubble of one that flushes."""
    flushed, endless = spec("tp=8,pp=4", 16), spec("tp=8,pp=4,schedule=pipedream", 16)
    whole = simulate(endless)
    assert whole.schedule.steps == 2
    assert figures(whole).step_time_s == pytest.approx(step_seconds(endless)) == pytest.approx(whole.seconds / 2)
    bubble = predict(flushed).parts.bubble
    assert predict(endless).parts.bubble == pytest.approx(bubble / 2, rel=0.02)
    assert step_seconds(flushed) - step_seconds(endless) == pytest.approx(bubble / 2, rel=0.1)


def test_a_step_of_one_small_model_on_one_device() -> None:
    one = spec("dp_replicate=1", 1, "gpt2", "dgx-h100:1")
    assert isinstance(one.model, ModelConfig)
    assert simulate(one).seconds == pytest.approx(predicted(one), rel=1e-9)


def test_a_rank_with_both_ends_has_a_tied_embedding_once() -> None:
    one = spec("pp=4,dp_replicate=2,schedule=zb_v", 8, "gpt2")
    content = contents(one)[0]
    assert one.model.tied
    assert content.embedding
    assert content.head
    held = held_by(one, content)
    costs = rank_seconds(one, schedule_of(one.layout, 8), 0, Disturbance())
    assert costs.optimizer == optimizer_seconds(one, held, content)
    assert sum(costs.reduce.values()) == pytest.approx(state_seconds(one, held, 2).reduce, rel=0.01)


def test_an_optimizer_of_whole_matrices_takes_as_long_as_predicted() -> None:
    one = replace(spec("tp=8,sp=true,dp_shard=8", 4, "llama3-8b"), optimizer=Optimizer("muon"))
    plain = replace(one, optimizer=Optimizer())
    more = predicted(one) - predicted(plain)
    assert step_seconds(one) - step_seconds(plain) == pytest.approx(more)
    assert more > 0.01 * predicted(plain)
