"""Productive time by cause: the formula against a simulation with spares in repair, its limits, tables, the verb."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cli.main import main
from phalanx.errors import JobError
from phalanx.simulate.causes import (
    LLAMA_3,
    Cause,
    FailureSpec,
    best_spares,
    expected,
    read_causes,
    remedies,
    simulate_failures,
    spread,
)
from phalanx.simulate.goodput import at

LLAMA = read_causes(LLAMA_3)
BASE = FailureSpec(LLAMA, 16384, 30, 300, 3600)

seconds = st.floats(0, 3000)
cause = st.builds(
    Cause,
    cause=st.just("x"),
    count=st.floats(0, 500),
    devices=st.just(16384.0),
    days=st.just(54.0),
    found_by=st.sampled_from(("crash", "timeout", "check")),
    detect_s=seconds,
    replace_s=seconds,
    repair_h=st.floats(0, 48),
)
specs = st.builds(
    FailureSpec,
    causes=st.lists(cause, min_size=1, max_size=6).map(tuple),
    devices=st.integers(1, 100_000),
    checkpoint_s=st.floats(0.1, 300),
    restart_s=seconds,
    interval_s=st.none() | st.floats(10, 1e5),
    spares=st.integers(0, 30),
)


def test_causes_that_leave_no_time_to_train_are_refused():
    with pytest.raises(JobError, match="1,000,000,000 devices fail 5.48 times per second by these causes"):
        expected(replace(BASE, devices=10**9))
    assert expected(replace(BASE, devices=10**8, restart_s=1e6)).total.fraction < 1e-9


def test_the_table_of_llama_3():
    """Table 5 has 18 rows, 419 in all, of which 148 are 35.3 % and not the 30.1 % that it prints."""
    assert len(LLAMA) == 18
    assert sum(each.count for each in LLAMA) == 419
    assert 100 * LLAMA[0].count / 419 == pytest.approx(35.3, abs=0.05)
    assert expected(BASE).total.mtbf_s / 3600 == pytest.approx(54 * 24 / 419)


@given(specs)
def test_the_shares_add_up_and_so_do_the_causes(spec):
    found = expected(spec)
    total = found.total
    assert total.fraction + total.saving + total.rework + total.restarting == pytest.approx(1)
    assert sum(found.lost) == pytest.approx(total.rework + total.restarting, abs=1e-9)
    assert all(-1e-12 <= share <= 1 for share in (*found.lost, found.shortage, found.of_owned))


@given(cause, st.integers(1, 100_000), st.floats(10, 1e5), seconds)
def test_one_cause_is_the_plain_model(one, devices, interval, restart):
    found = expected(FailureSpec((one,), devices, 30, restart, interval)).total
    plain = at(interval, devices, one.per_device_day, 30, restart + one.detect_s + one.replace_s)
    for name in ("fraction", "saving", "rework", "restarting", "mtbf_s"):
        assert getattr(found, name) == pytest.approx(getattr(plain, name), rel=1e-9, abs=1e-12), name


@given(specs, st.floats(0.01, 0.99))
def test_a_cause_in_two_rows_is_the_same(spec, part):
    first, *others = spec.causes
    halves = (replace(first, count=part * first.count), replace(first, count=(1 - part) * first.count))
    split, whole = expected(replace(spec, causes=(*halves, *others))), expected(spec)
    assert split.total.fraction == pytest.approx(whole.total.fraction, rel=1e-9)
    assert split.lost[0] + split.lost[1] == pytest.approx(whole.lost[0], rel=1e-6, abs=1e-12)


@given(specs)
def test_spares_help_less_and_less_and_the_best_number_is_the_best(spec):
    shares = [expected(replace(spec, spares=number)) for number in range(120)]
    for fewer, more in pairwise(shares):
        assert more.shortage <= fewer.shortage + 1e-12
        assert more.total.fraction >= fewer.total.fraction - 1e-9
    found = best_spares(spec)
    assert expected(replace(spec, spares=found)).of_owned >= max(each.of_owned for each in shares) - 1e-12


def test_the_shortage_is_the_tail_of_poisson():
    spec = replace(BASE, spares=5)
    tail = 1 - sum(math.exp(-spec.away) * spec.away**n / math.factorial(n) for n in range(5))
    assert spec.shortage == pytest.approx(tail)
    huge = replace(BASE, devices=10**8, spares=0)  # no underflow where many machines are away
    assert replace(huge, spares=round(huge.away)).shortage == pytest.approx(0.5, abs=0.02)
    assert replace(huge, spares=10**18).shortage == pytest.approx(0, abs=1e-9)


@given(specs, st.floats(0.1, 30))
def test_no_remedy_makes_it_worse(spec, background):
    first, *others = remedies(spec, background)
    for each in others:
        assert each.found.total.fraction >= first.found.total.fraction - 1e-9, each.name
    assert others[-1].found.total.fraction >= max(each.found.total.fraction for each in others) - 1e-9


@pytest.mark.parametrize(
    "spec",
    [
        BASE,
        replace(BASE, interval_s=None, spares=6, checkpoint_s=3),
        replace(BASE, devices=100_000, interval_s=900, restart_s=120, spares=40),
    ],
)
def test_the_simulation_finds_the_formula(spec):
    runs, found = [simulate_failures(spec, 120, seed) for seed in range(40)], expected(spec)

    def holds(values: list[float], value: float, name: str) -> None:
        mean = sum(values) / len(values)
        error = math.sqrt(sum((each - mean) ** 2 for each in values) / (len(values) - 1) / len(values))
        assert abs(mean - value) <= 4 * error + 1e-4, name

    for name in ("fraction", "saving", "rework", "restarting"):
        holds([getattr(run, name) / run.seconds for run in runs], getattr(found.total, name), name)
    for each, lost in zip(spec.causes, found.lost, strict=True):
        holds([run.by_cause[each.cause] / run.seconds for run in runs], lost, each.cause)
    takes = sum(rate for rate, each in zip(spec.rates, spec.causes, strict=True) if each.replace_s) / sum(spec.rates)
    holds([run.short / run.failures for run in runs], takes * found.shortage, "shortage")
    mean, low, high = spread(runs)
    assert low < mean < high
    assert simulate_failures(spec, 120, 7) == runs[7], "a seed is a run"


def test_effective_time_above_nine_tenths_takes_remedies():
    """Llama 3's paper reports more than 90 % effective training time."""
    given, *others = remedies(BASE, 3)
    assert given.found.total.fraction < 0.8
    assert 0.9 < others[-1].found.total.fraction < 1


def test_without_failures_all_time_is_productive():
    never = replace(BASE, causes=(replace(LLAMA[0], count=0.0),), interval_s=None)
    assert (expected(never).total.fraction, expected(never).total.interval_s) == (1, math.inf)
    with pytest.raises(JobError, match="needs failures"):
        simulate_failures(never, 1, 0)


HEADER = "cause,count,devices,days,found_by,detect_s,replace_s,repair_h\n"


@pytest.mark.parametrize(
    ("table", "problems"),
    [
        ("", ["without the columns cause, count"]),
        (HEADER, ["0 causes, where 1 to 1,000"]),
        (
            HEADER.replace("detect_s", "detects"),
            ["'detects' is no column; did you mean detect_s"],
        ),
        (
            HEADER + "GPU,-1,0,54,crsh,1,1,1\n,1,1,1,crash,nan,inf,x\nA,1,1\n",
            [
                "line 2: found_by: expected one of crash, timeout, check, found 'crsh'; did you mean crash",
                "line 3: detect_s: expected a number, found 'nan'",
                "line 3: replace_s: expected a number, found 'inf'",
                "line 3: repair_h: expected a number, found 'x'",
                "line 4: 3 cells, where the header has 8",
            ],
        ),
        (
            "cause,count,devices,days\nA,-1,0,54\n,1,1,1\n",
            ["line 2: count must not be negative", "line 2: devices must be above 0", "line 3: the cause has no name"],
        ),
        (HEADER + "A,1,1,1,crash,1,1,1\nA,1,1,1,crash,1,1,1\n", ["line 3: 'A' is there twice"]),
    ],
)
def test_every_mistake_in_a_table_is_named(tmp_path, table, problems):
    path = tmp_path / "causes.csv"
    path.write_text(table)
    with pytest.raises(JobError) as raised:
        read_causes(path)
    for problem in problems:
        assert any(problem in each for each in raised.value.problems), (problem, raised.value.problems)


def test_the_verb_reads_its_own_table(capsys, tmp_path):
    assert main(["goodput", "--print-causes"]) == 0
    (tmp_path / "mine.csv").write_text(capsys.readouterr().out)
    command = [
        "goodput",
        "--causes",
        str(tmp_path / "mine.csv"),
        "--svg",
        str(tmp_path / "remedies.svg"),
        "--runs",
        "4",
    ]
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["goodput"]["fraction"] == pytest.approx(expected(BASE).total.fraction)
    assert sum(each["per_day"] for each in document["causes"]) == pytest.approx(419 / 54)
    assert document["simulated"]["low"] < document["goodput"]["fraction"] < document["simulated"]["high"]
    assert len(document["remedies"]) == 9
    rows = [each.text for each in ElementTree.parse(tmp_path / "remedies.svg").iter() if each.tag.endswith("}text")]
    assert {each["remedy"] for each in document["remedies"]} <= {*rows}
    assert main(command) == 0
    assert "eight of ten from" in capsys.readouterr().out


def test_a_job_has_its_causes(capsys, tmp_path):
    job, table = tmp_path / "job.yaml", tmp_path / "mine.csv"
    job.write_text(
        "cluster:\n  preset: dgx-h100:2\n  failures:\n"
        "    - {cause: 'GPU, memory', count: 40, devices: 1024, days: 30, replace_s: 600, repair_h: 24}\n"
        "    - {cause: hang, count: 4, devices: 1024, days: 30, found_by: timeout, detect_s: 600}\n"
        "layout: {dp_shard: 16}\n"
    )
    assert main(["goodput", str(job), "--print-causes"]) == 0
    table.write_text(capsys.readouterr().out)
    assert main(["goodput", str(job), "--json"]) == 0
    of_job = capsys.readouterr().out
    assert main(["goodput", "--causes", str(table), "--devices", "16", "--json"]) == 0
    assert capsys.readouterr().out == of_job
    assert json.loads(of_job)["causes"][1]["per_day"] == pytest.approx(4 / 30 / 64)


def test_every_mistake_in_a_jobs_causes_is_named(capsys, tmp_path):
    job = tmp_path / "job.yaml"
    for rows, found in (
        ("[{cause: a, count: x, days: 1}, {cause: b, found: 1}]", ("item 1: count: exp", "item 1: devices is missing")),
        ("[{cause: a, count: x, days: 1}, {cause: b, found: 1}]", ("item 2: unknown key 'found'; did you mean",)),
        ("[{cause: a, count: -1, devices: 0, days: 1}]", ("count must not", "devices must be", "--days 0: exp")),
        ("[{cause: a, count: 1, devices: 1, days: 1}]", ("--causes beside",)),
    ):
        job.write_text(f"cluster: {{failures: {rows}}}")
        options = ["--days", "0"] if "--days" in found[-1] else ["--causes", "x.csv"] if "--causes" in found[0] else []
        assert main(["goodput", str(job), *options]) == 2
        message = " ".join(capsys.readouterr().err.split())
        assert all(words in message for words in found), message


@pytest.mark.parametrize("found_by", ["crash", "timeout"])
def test_replicas_that_come_and_go_lose_what_a_simulation_of_them_loses(found_by):
    """Failures one after the other, each of which takes one of 64 replicas away and holds up the others for a step."""
    cause = Cause("x", 24.0, 64.0, 1.0, found_by, 90.0)
    spec = FailureSpec((cause,), 64, 10, 900, 780, devices_per_node=1, replicas=64, step_s=8.0)
    generator, rate, clock, stalled, away = random.Random(3), spec.rates[0], 0.0, 0.0, 0.0
    for _ in range(4000):
        clock += generator.expovariate(rate)
        stalled += 8.0 + 90.0 * (found_by == "timeout")
        away += (900 + 90) / 64
    found, plain = expected(spec), expected(replace(spec, replicas=1))
    assert found.total.fraction == pytest.approx((1 - stalled / clock) * (1 - away / clock) * 780 / 790, rel=2e-3)
    assert found.total.fraction > 0.95
    assert plain.total.fraction < 0.75
    shares = found.total.saving, found.total.rework, found.total.restarting
    assert found.total.fraction + math.fsum(shares) == pytest.approx(1)
    assert found.total.mtbf_s == plain.total.mtbf_s == pytest.approx(3600)


def test_wrong_numbers_reach_all_replicas_and_send_them_back():
    only = replace(BASE, causes=tuple(each for each in LLAMA if each.found_by == "check"))
    assert vars(expected(replace(only, replicas=16)).total) == pytest.approx(vars(expected(only).total))
    named = {each.name: each for each in remedies(BASE, 3, 16)}
    gone = named["16 replicas that come and go"].found
    assert gone.total.fraction > named["as given"].found.total.fraction + 0.15
    assert gone.lost[LLAMA.index(only.causes[0])] > gone.lost[LLAMA.index(LLAMA[0])]


def test_a_run_says_how_long_its_restarts_and_saves_take(capsys, tmp_path):
    (tmp_path / "config.yaml").write_text("{}")
    rows = tmp_path / "metrics.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ({"event": "checkpoint", "step": 5, "waited_s": 0.5},)))
    assert main(["goodput", "--run", str(tmp_path)]) == 2
    assert "the run has no restart" in " ".join(capsys.readouterr().err.split())
    restarts = ({"event": "restart", "step": 5, "attempt": 1, "down_s": down} for down in (2.0, 4.0))
    with rows.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in restarts)
    assert main(["goodput", "--run", str(tmp_path), "--json"]) == 0
    by_name = {each["remedy"]: each for each in json.loads(capsys.readouterr().out)["remedies"]}
    assert by_name["restart in 1.5s"]
    assert by_name["save in the background (500ms)"]["checkpoint_s"] == 0.5


def test_impossible_options_are_all_named(capsys):
    assert (
        main(["goodput", "--every-minutes", "x", "--checkpoint-s", "-1", "--restart-s", "inf", "--spares", "-2"]) == 2
    )
    message = " ".join(capsys.readouterr().err.split())
    for words in (
        "--every-minutes: expected",
        "--checkpoint-s: must be at least 0",
        "--restart-s: exp",
        "--spares: must",
    ):
        assert words in message
    assert main(["goodput", "--days", "0"]) == 2
    assert "--days 0: expected more than 0" in capsys.readouterr().err
    assert main(["goodput", "--causes", "nowhere.csv"]) == 2
    assert "nowhere.csv: No such file" in capsys.readouterr().err
