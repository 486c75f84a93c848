"""`phalanx serve` as a user runs it: the address, an answer, SIGTERM, and what is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from generate.written import write_run
from model.kinds import KINDS
from phalanx.cli.main import main

pytest.importorskip("uvicorn")


@pytest.fixture
def run(tmp_path) -> Path:
    write_run(tmp_path / "run", KINDS["llama"])
    return tmp_path / "run"


def test_a_run_is_served_until_sigterm(run, tmp_path):
    write_run(tmp_path / "small", replace(KINDS["gpt2"], n_layers=1))
    argv = ["serve", str(run), "--port", "0", "--assistant", str(tmp_path / "small")]
    environment = {**os.environ, "PHALANX_API_KEY": "sesame"}
    command = [sys.executable, "-m", "phalanx", *argv]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            found = re.search(r"run on (http://127\.0\.0\.1:\d+/v1)", line := process.stderr.readline())
            assert found, line
            body = json.dumps({"prompt": "5 0 17", "max_tokens": 4, "temperature": 0}).encode()
            headers = {"Content-Type": "application/json", "Authorization": "Bearer sesame"}
            request = urllib.request.Request(f"{found[1]}/completions", body, headers)
            with urllib.request.urlopen(request, timeout=30) as answer:
                text = json.loads(answer.read())["choices"][0]["text"]
            process.send_signal(signal.SIGTERM)
            _, error = process.communicate(timeout=30)
        finally:
            process.kill()
    assert len(text.split()) == 4
    assert process.returncode == 0, error
    assert "SIGTERM: ending" in error
    assert "sesame" not in error


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--batch", "0", "--port", "70000"], 2, "batch 0: at least 1\n  port 70000: 0 to 65535"),
        (["--prot", "1"], 2, "unknown option --prot; did you mean --port"),
        (["--host", "192.0.2.1"], 1, "cannot listen on 192.0.2.1 port 8000"),
        (["--port", "0", "--draft-tokens", "0", "--assistant", "RUN"], 2, "--draft-tokens: must be at least 1, is 0"),
    ],
)
def test_what_is_wrong_is_refused(run, capsys, argv: list[str], code: int, message: str):
    assert main(["serve", str(run), *[str(run) if word == "RUN" else word for word in argv]]) == code
    assert message in capsys.readouterr().err
