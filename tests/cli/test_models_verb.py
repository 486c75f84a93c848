"""`phalanx models` and `phalanx collectives`: lists, figures and pictures; mistakes are one message."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.blocks.parameters import count, count_active
from phalanx.cli.main import main
from phalanx.cli.weights import table
from phalanx.comm.algorithms.program import ALGORITHMS, build
from phalanx.config.presets import CATALOGUE, PRESETS

# `phalanx models`: lists, filters and details of presets; mistakes are one message.


WITHOUT_TORCH = """
import sys
from phalanx.cli.main import main
code = main(["models", "--json"])
sys.exit("imported torch" if {"torch", "numpy"} & set(sys.modules) else code)
"""


def output(capsys, *argv: str) -> str:
    assert main(["models", *argv]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def names(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines()]


def test_a_shape_that_is_no_model_is_refused(tmp_path, capsys):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8, "vocab_size": 9}
    cases = {
        "num_key_value_heads": (3, "nearest n_kv_heads: 1, 2, 4"),
        "num_hidden_layers": (0, "is 0, expected at most 10,000 and at least 1"),
    }
    for name, (value, said) in cases.items():
        config = {"model_type": "llama", "num_hidden_layers": 1, **sizes, name: value}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert main(["models", f"hf:{tmp_path}"]) == 2
        assert said in capsys.readouterr().err


def test_on_a_narrow_terminal_kinds_and_source_are_below():
    lines = table(list(CATALOGUE), 80).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == list(CATALOGUE)
    assert table(list(CATALOGUE), 500) == table(list(CATALOGUE))


def test_it_answers_without_torch_and_lists_every_preset():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    listed = {entry["name"]: entry for entry in json.loads(done.stdout)}
    assert list(listed) == list(CATALOGUE)
    for name, entry in listed.items():
        known = PRESETS[name].vocab_size > 0
        assert entry["parameters"] == (count(PRESETS[name]) if known else None)
        assert entry["active_parameters"] == (count_active(PRESETS[name]) if known else None)
        assert entry["source"] == CATALOGUE[name].source


def test_the_list_has_every_preset(capsys):
    assert names(output(capsys)) == list(CATALOGUE)


def test_counts_are_rounded(capsys):
    lines = {line.split()[0]: line.split()[1] for line in output(capsys).splitlines()}
    assert [lines[name] for name in ("gpt2", "gemma3-1b", "llama3.1-8b", "kimi-k2", "tiny")] == [
        *("124M", "1.00B", "8.03B", "1.03T"),
        "-",
    ]


YARN = ["gpt-oss-20b", "gpt-oss-120b", "kimi-k2", "olmo3-7b", "olmo3-32b"]
LATENT = [
    *("deepseek-v3", "kimi-k2", "glm-5", "deepseek-v3.2"),
    *("nemotron3-super-120b-a12b", "nemotron3-ultra-550b-a55b", "tiny-deepseek"),
]
"""Latent attention, and experts in latents."""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["mixtral"], ["mixtral-8x7b", "tiny-moe"]),
        (["gemma2"], ["gemma2-2b", "gemma2-9b", "gemma2-27b"]),
        (["SINKS", "128 experts"], ["gpt-oss-120b"]),
        (["latent"], LATENT),
        (["yarn"], ["ministral3-3b", "ministral3-8b", "ministral3-14b", *YARN]),
    ],
)
def test_words_filter_the_list(capsys, words: list[str], expected: list[str]):
    assert names(output(capsys, *words)) == expected
    assert [entry["name"] for entry in json.loads(output(capsys, *words, "--json"))] == expected


def test_a_name_gives_the_details(capsys):
    text = output(capsys, "qwen3-30b-a3b")
    assert text == output(capsys, "Qwen/Qwen3-30B-A3B")
    for fact in (
        "3,353,032,704 per token",
        "8 of 128 experts of 768",
        "4,096 tokens (seq_len)",
        "40,960",
        "arXiv 2505.09388",
    ):
        assert fact in text
    entry = json.loads(output(capsys, "glm-5", "--json"))
    assert entry["active_parameters"] == count_active(PRESETS["glm-5"])
    assert "sparse attention" in entry["note"]


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_preset_has_details(capsys, name: str):
    lines = output(capsys, name).splitlines()
    assert lines[0] == name
    assert all(len(line) < 400 for line in lines)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["qwen9"], "no model preset has 'qwen9' in its name, kinds or source; `phalanx models` lists all"),
        (["zzz"], "`phalanx models` lists all"),
        (["--yaml"], "unknown option --yaml"),
    ],
)
def test_mistakes_are_one_message(capsys, argv: list[str], message: str):
    assert main(["models", *argv]) == 2
    assert message in capsys.readouterr().err


def test_the_page_shows_the_usage(capsys):
    assert "phalanx models [NAME|WORD ...]" in output(capsys, "--help")


@pytest.mark.parametrize("words", [["--ignore-config", "colour"], ["model.ignore_config=[colour]"]])
def test_a_field_of_a_config_is_left_out(tmp_path, capsys, words: list[str]):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = {"model_type": "llama", "vocab_size": 100, **sizes, "colour": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["models", f"hf:{tmp_path}"]) == 2
    assert "model.ignore_config=[colour]" in capsys.readouterr().err
    assert "colour is read as if it were absent" in output(capsys, f"hf:{tmp_path}", *words)
    assert main(["models", "gpt2", *words]) == 2
    assert "is for fields of a config.json" in capsys.readouterr().err


# `phalanx collectives`: figures, tables and pictures of the algorithms, and mistakes in one message.

ROOT = Path(__file__).parents[2]
PICTURES = ("ring", "tree", "halving", "hierarchical")


def shown(capsys, *argv: str) -> str:
    assert main(["collectives", *argv]) == 0
    return capsys.readouterr().out


def test_list_has_every_algorithm(capsys):
    assert [line.split()[0] for line in shown(capsys, "list").splitlines()] == list(ALGORITHMS)
    assert [entry["name"] for entry in json.loads(shown(capsys, "list", "--json"))] == list(ALGORITHMS)


def test_show_counts_and_draws(capsys):
    found = shown(capsys, "show", "ring-all-reduce", "--ranks", "4", "--elements", "1000").splitlines()
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
    assert shown(capsys, "check", "ring_all_reduce", "--ranks", "2", "--elements", "7") == (
        "ring-all-reduce: correct result on each of 2 ranks, with 7 elements\n"
    )
    assert json.loads(shown(capsys, "check", "tree-reduce", "--ranks", "2", "--root", "1", "--json"))["ok"]


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
    found = json.loads(shown(capsys, "show", name, "--ranks", str(ranks), "--element-bytes", "2", "--json"))
    program = build(name, ranks, 2**20)
    assert found["messages_sent"] == program.messages_sent()
    assert found["bytes_sent"] == [2 * elements for elements in program.elements_sent()]
    assert found["critical_bytes"] == 2 * program.critical_elements()
    assert sum(len(step["messages"]) for step in found["steps"]) == len(program.messages)
    assert name.replace("-", " ").split()[-1] in program.name.replace("-", " ")


def test_unequal_ranks_are_listed_and_many_are_cut(capsys):
    few = shown(capsys, "show", "tree-reduce", "--ranks", "3", "--root", "1")
    assert "messages sent per rank: 1, 0, 1" in few
    many = shown(capsys, "show", "naive-all-reduce", "--ranks", "40")
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
