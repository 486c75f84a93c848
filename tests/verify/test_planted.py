"""`phalanx verify` finds the bugs of tests/verify/bugs.py, planted on the ranks of a layout.

By default some fast ones; `make planted` plants all of them."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache

import pytest

from phalanx.api import load_job
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.layout_line import parse
from phalanx.verify.locate import Divergence, locate
from phalanx.verify.measure import MIN_STEPS, TOLERANCE, Differences, compare, record
from phalanx.verify.run import FirstDifference, first_difference
from phalanx.verify.select import Selection, select
from phalanx.verify.trace import trace_step
from verify.bugs import BUGS, MODELS
from verify.plant import Bug, NoTargetError, WithBug, edited

WHOLE = "PHALANX_PLANTED" in os.environ
FAST = (
    "each rank's loss is a mean over its own tokens, and gradients are the mean of those",
    "one bucket's parameters are not gathered after the optimizer",
    "weights that every tensor rank holds whole are counted once a rank in the norm",
    "the gradients of routers are not summed over the tensor ranks",
    "the layers of a stage run in reverse order",
    "a rank runs the layers of its interleaved chunks in each other's place",
    "gathered keys, of which the indexer chooses, are in the order of the context-parallel ranks",
)
"""The bugs that are planted by default."""


def job_of(bug: Bug) -> Job:
    return load_job(*MODELS[bug.model].split(), *bug.job.split())


@pytest.fixture(scope="module")
def compared(ranks, tmp_path_factory):
    """`compared(bug, selection, layout)`: what verify measures of a layout, without the bug and with it."""
    folder, records, clean = tmp_path_factory.mktemp("records"), {}, {}

    def measured(bug: Bug, selection: Selection, layout: Layout) -> tuple[Differences, Differences]:
        stale, alone, vocab = selection.stale(layout), selection.alone(layout), selection.compared.vocab_size
        steps = MIN_STEPS if stale else 2
        if (of := (alone, stale)) not in records:
            records[of] = folder / str(len(records))
            ranks(record, 1, alone, vocab, steps, records[of], stale)
        case = selection.case(layout), vocab, steps, records[of]
        if case not in clean:
            clean[case] = ranks(compare, layout.processes, *case)[0]
        return clean[case], ranks(WithBug(bug, compare), layout.processes, *case)[0]

    return measured


def said(found: FirstDifference, where: Divergence | None) -> str:
    """Returns what verify says of a difference: not its first parameter, which is nearly always the embedding, where
    the second pass names a place."""
    named = (where.module, where.what, where.axis, where.collective, *where.between) if where else (found.name,)
    return " | ".join(map(str, (found.what, *named)))


each_planted = pytest.mark.parametrize(
    "bug", [bug for bug in BUGS if WHOLE or bug.what in FAST], ids=lambda bug: bug.what
)


@each_planted
def test_verify_finds_and_names_it(compared, ranks, bug):
    selection = select(job_of(bug), lines=[bug.layout])
    (layout,) = selection.layouts
    without, with_it = compared(bug, selection, layout)
    assert first_difference(without, TOLERANCE) is None
    found = first_difference(with_it, TOLERANCE)
    assert found is not None
    if bug.parts:  # which shows on the ranks themselves, without one process
        assert any(with_it.copies)
    where = locate(ranks, selection, layout, found.step, WithBug(bug, trace_step))
    assert bug.named in said(found, where)


@pytest.mark.skipif(not WHOLE, reason="traces every layout: make planted")
@pytest.mark.parametrize(
    "bug", {(bug.model, bug.job, bug.layout): bug for bug in BUGS}.values(), ids=lambda bug: bug.what
)
def test_a_layout_without_a_bug_has_no_module_that_differs(ranks, bug):
    selection = select(job_of(bug), lines=[bug.layout])
    for step in (1, 2):
        assert locate(ranks, selection, selection.layouts[0], step) is None


def test_there_are_forty_and_each_has_its_target():
    """Those that are not planted by default, too: a bug whose line is gone is written anew."""
    assert len(BUGS) >= 40
    assert len({bug.what for bug in BUGS}) == len(BUGS)
    assert {bug.what for bug in BUGS} >= {*FAST}
    for bug in BUGS:
        assert edited(bug)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "parallel.ring:_merged"}, "there is no _merged"),
        ({"target": "parallel.ring:RECEIVE"}, "there is no RECEIVE"),
        ({"edits": (("gone", "there"),)}, "has 'gone' 0 times"),
        ({"edits": (("lse", "other"),)}, r"has 'lse' \d+ times"),
    ],
)
def test_a_bug_without_its_target_is_an_error(change, message):
    with pytest.raises(NoTargetError, match=message):
        edited(Bug("", "cp=2", "parallel.ring:_merge", (), "")._replace(**change))


@pytest.mark.parametrize("bug", [bug for bug in BUGS if WHOLE or bug.what == FAST[0]], ids=lambda bug: bug.what)
def test_its_layout_is_among_those_compared_by_default(bug):
    """The layout itself if it is the job's own, and one with its techniques if the job's own is one device."""
    job = job_of(bug)
    own = parse(bug.layout)
    assert is_like(select(replace(job, layout=own)).layouts[0], own)
    assert like_by_default(bug)


@pytest.mark.skipif(not WHOLE, reason="plants every bug again: make planted")
@each_planted
def test_a_layout_compared_by_default_shows_it(compared, bug):
    for layout in like_by_default(bug):
        without, found = compared(bug, by_default(bug.model, bug.job), layout)
        assert first_difference(without, TOLERANCE) is None
        if first_difference(found, TOLERANCE) is not None:
            return
    pytest.fail("no layout that is compared by default shows it")


def like_by_default(bug: Bug) -> list[Layout]:
    """Returns the layouts that are compared by default, for a job on one device, with the techniques of a bug's."""
    return [layout for layout in by_default(bug.model, bug.job).layouts if is_like(layout, parse(bug.layout))]


@cache
def by_default(model: str, settings: str) -> Selection:
    return select(load_job(*MODELS[model].split(), *settings.split()))


def is_like(layout: Layout, other: Layout) -> bool:
    """Returns whether a layout has the techniques of another one, perhaps with other sizes."""
    fields = {name: value for name, value in vars(other).items() if value != getattr(Layout(), name)}
    if other.pp > 1:
        fields.pop("accumulation", None)  # a pipeline has micro-batches in any case
    return all(
        getattr(layout, name) > getattr(Layout(), name)
        if isinstance(value, int) and not isinstance(value, bool) and name != "zero"
        else value in (getattr(layout, name), *str(getattr(layout, name)).split("+"))
        for name, value in fields.items()
    )
