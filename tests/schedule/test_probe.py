"""An entry that is added is compared with its own programs; every fact that they contradict is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.errors import ExtensionError
from phalanx.schedule.catalogue import SCHEDULES
from phalanx.schedule.entry import ScheduleEntry
from phalanx.schedule.generators import gpipe, one_f_one_b
from phalanx.schedule.probe import entry_problems
from phalanx.schedule.schedule import Schedule

ENTRY = replace(SCHEDULES["1f1b"], also_called=(), seeds=False, usual=False)


def test_a_true_entry_has_no_problems():
    assert list(entry_problems("1f1b", ENTRY)) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"in_flight": lambda p, m, v, r: p},
            "in_flight is 2 on rank 0 with 2 ranks, 1 micro-batches; it must be 1 to",
        ),
        ({"in_flight": lambda p, m, v, r: 0}, "in_flight is 0 on rank 0"),
        ({"in_flight": lambda p, m, v, r: 1}, "half of the program's peak"),
        ({"in_flight": lambda p, m, v, r: 1 / 0}, "in_flight failed: ZeroDivisionError"),
        (
            {"idle": lambda p, m, v, f: p},
            "idle is 2 with 2 ranks, 1 micro-batches .* but idle_is_exact, and the program",
        ),
        ({"idle": lambda p, m, v, f: p, "idle_is_exact": lambda p, m: False}, "idle is 2 .* it must be 0 to 1"),
        ({"idle": lambda p, m, v, f: (p - 1) if m > 0 else 0}, "idle for arrays failed: ValueError"),
        ({"all_in_flight": True}, "all_in_flight is True, but the programs' peaks say False"),
        ({"placement": "V"}, "placement is 'V', but with 2 ranks"),
        ({"splits": True}, "splits is True, but no program has a W"),
        ({"steps": 2}, "searched: the planner tries only schedules of whole sequences"),
        ({"chunks": (2, 1)}, r"chunks \(2, 1\): the fewest stages per rank"),
        ({"chunks": (2, 2)}, "placement is 'round robin', but with 2 ranks, 1 micro-batches, 2 stages per rank"),
        ({"searched": False, "seeds": True}, "seeds and usual are for schedules that are searched"),
        ({"interleaves": "gpipe"}, "interleaves is for schedules whose number of stages per rank is a choice"),
        ({"most_searched_chunks": 0}, "most_searched_chunks must be at least 1"),
        ({"also_called": ("One F",)}, "also_called: One F must be lower-case letters and digits"),
        ({"build": gpipe}, "its name is 'gpipe', not '1f1b'"),
        ({"build": lambda p, m: None}, "build must return a Schedule, returned NoneType"),
        ({"build": lambda p, m: one_f_one_b(p, m + 1)}, "its micro_batches is 2, not 1"),
        ({"build": lambda p, m: replace(one_f_one_b(p, m), programs=((),) * p)}, "rank 0 has no actions"),
        ({"refuses": lambda p, m, v: "never"}, "refuses: no pipeline of 2 to 4 ranks is left"),
        ({"refuses": lambda p, m, v: "too many" if m > 20 else ""}, "refuses 24 micro-batches on 4 ranks, a multiple"),
        (
            {"refuses": lambda p, m, v: "" if m > 2 * p else "few"},
            "2 ranks take no number of micro-batches up to 4, but",
        ),
    ],
)
def test_a_contradiction_is_named(changed: dict[str, object], message: str):
    found = list(entry_problems("1f1b", replace(ENTRY, **changed)))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=message):
        raise ValueError(found)


def test_a_program_that_cannot_be_built_is_named():
    with pytest.raises(ExtensionError, match="^2 ranks, 1 micro-batches: build failed: TypeError"):
        list(entry_problems("1f1b", replace(ENTRY, build=lambda p: p)))  # pyright: ignore[reportArgumentType]


def test_every_contradiction_is_named_at_once():
    wrong = replace(ENTRY, in_flight=lambda p, m, v, r: 0, idle=lambda p, m, v, f: -1.0, all_in_flight=True)
    assert len(list(entry_problems("1f1b", wrong))) == 3


def growing(ranks: int, micro_batches: int) -> Schedule:
    """A schedule that does not repeat itself: gpipe for up to 25 micro-batches, 1f1b for more."""
    build = gpipe if micro_batches <= 25 else one_f_one_b
    return replace(build(ranks, micro_batches), name="growing")


def test_a_schedule_that_does_not_repeat_itself_is_refused():
    entry = ScheduleEntry(
        growing,
        "one or the other",
        "this test",
        in_flight=lambda p, m, v, r: m,
        idle=lambda p, m, v, forward: p - 1,
        searched=False,
    )
    found = list(entry_problems("growing", entry))
    assert any("activations of rank 0 of 4 grow" in problem or "all_in_flight" in problem for problem in found), found
