"""`phalanx models`: lists, filters and details of presets; mistakes are one message."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from phalanx.blocks.parameters import count, count_active
from phalanx.cli.main import main
from phalanx.cli.models import table
from phalanx.config.presets import CATALOGUE, PRESETS

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
    cases = {"num_key_value_heads": (3, "nearest n_kv_heads: 1, 2, 4"), "num_hidden_layers": (0, "at least 1, is 0")}
    for name, (value, said) in cases.items():
        config = {"model_type": "llama", "num_hidden_layers": 1, **sizes, name: value}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert main(["models", f"hf:{tmp_path}"]) == 2
        assert said in capsys.readouterr().err


def test_on_a_narrow_terminal_kinds_and_source_are_below():
    lines = table(list(CATALOGUE), 80).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == list(CATALOGUE)
    assert table(list(CATALOGUE), 300) == table(list(CATALOGUE))


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
        (["yarn"], ["gpt-oss-20b", "gpt-oss-120b", "kimi-k2", "olmo3-7b", "olmo3-32b"]),
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
    assert "full attention" in entry["note"]


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
