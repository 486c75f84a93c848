"""`phalanx generate` as a user runs it: several prompts, an assistant, ranks, what is printed, exit codes, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from generate.written import write_run
from model.kinds import KINDS
from phalanx.cli.main import main
from phalanx.data.tokenizer import NumberTokenizer


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run of two layers, a temporary directory of our own, and no trace of another launcher."""
    write_run(tmp_path / "run", KINDS["llama"])
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "run"


def generated(capsys, *argv: str) -> dict:
    assert main(["generate", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_tensor_ranks_print_the_text_of_one_process(run, capsys):
    argv = [str(run), "--prompt", "5 0 17", "--max-new-tokens", "12"]
    alone = generated(capsys, *argv)
    argv = ["generate", *argv, "--json", "--tp", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", *argv], capture_output=True, text=True, check=False, timeout=180
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["texts"] == alone["texts"]
    assert (found["tp"], found["pp"], found["text"]) == (2, 1, alone["text"])
    assert len(alone["text"].split()) == 15
    assert "new_tokens: 11" in done.stderr
    assert not list(Path(os.environ["TMPDIR"]).iterdir())


def test_a_file_of_prompts_gives_each_its_own_text(run, tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text('"5 0 17"\n{"prompt": "3"}\n')
    several = generated(capsys, str(run), "--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "4")
    for row, prompt in zip(several["texts"], ("5 0 17", "3"), strict=True):
        assert row == generated(capsys, str(run), "--prompt", prompt, "--max-new-tokens", "4")["texts"][0]
    (tmp_path / "prompts.txt").write_text("5 0 17\n\n3\n")
    argv = ["generate", str(run), "--prompts", str(tmp_path / "prompts.txt"), "--max-new-tokens", "4", "--samples", "2"]
    assert main(argv) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0::2] == [f"--- prompt {prompt}, sample {sample}" for prompt in (1, 2) for sample in (1, 2)]
    assert out[1] == several["texts"][0]["text"]


def test_a_stop_string_ends_the_text_before_it(run, capsys):
    whole = generated(capsys, str(run), "--prompt", "5", "--max-new-tokens", "12")["text"]
    stop = " " + whole.split()[6]
    found = generated(capsys, str(run), "--prompt", "5", "--max-new-tokens", "12", "--stop", "no", "--stop", stop)
    assert found["text"] == whole[: whole.index(stop, 1)]
    assert found["texts"][0]["finish"] == "stop"


def test_an_assistant_leaves_greedy_text_as_it_is_and_reports_its_part(run, tmp_path, capsys):
    write_run(tmp_path / "small", replace(KINDS["gpt2"], n_layers=1))
    argv = [str(run), "--prompt", "5 0 17", "--max-new-tokens", "8", "--temperature", "0"]
    helped = generated(capsys, *argv, "--assistant", str(tmp_path / "small"), "--compare")
    assert helped["text"] == generated(capsys, *argv)["text"]
    assert {"acceptance", "alpha", "tokens_per_pass", "speedup", "expected_speedup"} <= set(helped["stats"])


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--pp", "3", "--tp", "3"], 2, "1 ≤ pp 3 ≤ n_layers 2 does not hold"),
        (["--samples", "0", "--compare"], 2, "--samples: must be at least 1, is 0"),
        (["--prompts", "none.txt"], 2, "--prompts none.txt: there is no such file"),
        (["--prompts", "none.txt", "--prompt", "5"], 2, "--prompt and --prompts: give one"),
        (["--assistant", "none", "--prompt", "5"], 2, "no run in none: there is no such folder"),
        (
            ["--temperature", "-1", "--prompt", ""],
            2,
            "--prompt: is empty: a text needs a token to begin with; without the option it is a newline\n"
            "  temperature=-1.0: it must be 0 (the likeliest token) or more",
        ),
        (["--tempreature", "0"], 2, "did you mean --temperature"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_starts(run, capsys, argv: list[str], code: int, message: str):
    assert main(["generate", str(run), "--max-new-tokens", "1", *argv]) == code
    assert message in capsys.readouterr().err
    assert not list(Path(os.environ["TMPDIR"]).iterdir())


def test_a_bad_line_of_prompts_is_named(run, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('"5"\n{"text": "3"}\n')
    assert main(["generate", str(run), "--prompts", str(tmp_path / "p.jsonl")]) == 4
    assert "p.jsonl:2: expected a JSON string" in capsys.readouterr().err


def test_ctrl_c_keeps_what_was_written(run):
    argv = ["generate", str(run), "--prompt", "5", "--max-new-tokens", "100000000"]
    with subprocess.Popen(
        [sys.executable, "-m", "phalanx", *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            begun = process.stdout.read(40)
            process.send_signal(signal.SIGINT)
            rest, error = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130, error
    assert (begun + rest).startswith(b"5 ")
    assert (begun + rest).endswith(b"\n")
    assert b"new_tps:" in error
    assert b"Traceback" not in error


@pytest.mark.cold
def test_ctrl_c_ends_every_rank(run):
    argv = ["generate", str(run), "--prompt", "5", "--max-new-tokens", "100000000", "--pp", "2"]
    with subprocess.Popen(
        [sys.executable, "-m", "phalanx", *argv], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            end = time.monotonic() + 60
            while len(ranks := _children(process.pid)) < 3:  # and the process that forks them
                assert time.monotonic() < end, "no ranks were started"
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130, error
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(run, capsys):
    NumberTokenizer(KINDS["llama"].vocab_size + 1).save(run)
    assert main(["generate", str(run), "--prompt", "5"]) == 4
    assert "it is another model's tokenizer" in capsys.readouterr().err
