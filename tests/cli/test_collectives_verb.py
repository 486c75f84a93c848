"""`phalanx collectives`: figures, tables and pictures of the algorithms, and mistakes in one message."""

import json
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.comm.algorithms.program import ALGORITHMS, build

ROOT = Path(__file__).parents[2]
PICTURES = ("ring", "tree", "halving", "hierarchical")


def output(capsys, *argv: str) -> str:
    assert main(["collectives", *argv]) == 0
    return capsys.readouterr().out


def test_list_has_every_algorithm(capsys):
    assert [line.split()[0] for line in output(capsys, "list").splitlines()] == list(ALGORITHMS)
    assert [entry["name"] for entry in json.loads(output(capsys, "list", "--json"))] == list(ALGORITHMS)


def test_show_counts_and_draws(capsys):
    found = output(capsys, "show", "ring-all-reduce", "--ranks", "4", "--elements", "1000").splitlines()
    assert found[:5] == [
        "ring all-reduce: 4 ranks, 1,000 elements of 4 bytes (3.9KiB)",
        "steps: 6",
        "messages sent per rank: 6",
        "bytes sent per rank: 5.9KiB",
        "bytes on the critical path: 5.9KiB",
    ]
    assert found[7].split() == ["1", "reduce-scatter", "3⇒1", "0⇒2", "1⇒3", "2⇒0"]
    assert found[-2].split() == ["6", "all-gather", "2→1", "3→2", "0→3", "1→0"]


def test_check_runs_an_algorithm(capsys):
    assert output(capsys, "check", "ring_all_reduce", "--ranks", "2", "--elements", "7") == (
        "ring-all-reduce: correct result on each of 2 ranks, with 7 elements\n"
    )
    assert json.loads(output(capsys, "check", "tree-reduce", "--ranks", "2", "--root", "1", "--json"))["ok"]


def test_check_names_the_ranks_with_a_wrong_result(capsys, monkeypatch):
    monkeypatch.setattr("phalanx.launch.pool.Pool.run", lambda *_: [True, False])
    assert main(["collectives", "check", "gather", "--ranks", "2"]) == 1
    assert "gather: wrong result on ranks 1 of 2, with 1,048,576 elements" in capsys.readouterr().err


def test_check_refuses_a_process_too_many(capsys):
    assert main(["collectives", "check", "gather", "--ranks", "17"]) == 2
    assert "ranks 17: check starts a process per rank, at most 16" in capsys.readouterr().err


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("ranks", [1, 2, 6])
def test_the_document_has_what_the_program_has(name, ranks, capsys):
    found = json.loads(output(capsys, "show", name, "--ranks", str(ranks), "--element-bytes", "2", "--json"))
    program = build(name, ranks, 2**20)
    assert found["messages_sent"] == program.messages_sent()
    assert found["bytes_sent"] == [2 * elements for elements in program.elements_sent()]
    assert found["critical_bytes"] == 2 * program.critical_elements()
    assert sum(len(step["messages"]) for step in found["steps"]) == len(program.messages)
    assert name.replace("-", " ").split()[-1] in program.name.replace("-", " ")


def test_unequal_ranks_are_listed_and_many_are_cut(capsys):
    few = output(capsys, "show", "tree-reduce", "--ranks", "3", "--root", "1")
    assert "messages sent per rank: 1, 0, 1" in few
    many = output(capsys, "show", "naive-all-reduce", "--ranks", "40")
    assert "messages sent per rank: 1 to 39" in many
    assert "not shown: 46 of 78 steps, 28 of 40 ranks; --svg and --json have them all" in many


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["shw", "scatter"], "no command 'shw'; did you mean `phalanx collectives show`?"),
        (["ring-all-reduce"], "put the command first: `phalanx collectives show ring-all-reduce`"),
        (["show"], "takes NAME, found nothing"),
        (["show", "ring"], "no collective algorithm 'ring'; did you mean ring-all-reduce?"),
        (["show", "ring-allreduce"], "did you mean ring-all-reduce?"),
        (["show", "scatter", "--rank", "4"], "unknown option --rank; did you mean --ranks?"),
        (["show", "scatter", "--ranks", "0"], "--ranks: must be at least 1, is 0"),
        (["show", "scatter", "--ranks", "100000"], "ranks 100000: at most 512"),
        (["show", "scatter", "--root", "4"], "root 4 is not one of the 4 ranks"),
        (["show", "all-to-all", "--root", "1", "--group", "2"], "all-to-all has no group; leave --group out"),
        (["show", "hierarchical-all-reduce", "--group", "3"], "possible sizes: [1, 2, 4]"),
        (["show", "scatter", "--svg", "/no/where.svg"], "folder /no does not exist; create it, or name another"),
    ],
)
def test_mistakes_are_one_message_and_code_2(argv, message, capsys):
    assert main(["collectives", *argv]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
