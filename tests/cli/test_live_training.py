"""`phalanx train` on a terminal of 80 columns: the live view, Ctrl-C, and the report that is left."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import struct
import sys
import termios
import time
from fcntl import ioctl
from pathlib import Path

JOB = """
model: {n_layers: 1, d_model: 16, n_heads: 2, seq_len: 16}
cluster: {peak_tflops: 1.0}
layout: {dp_replicate: 2}
data: {corpus: random, random_tokens: 2000, random_vocab: 13}
train: {steps: 1000000, global_batch: 4, eval_samples: 0, log_every: 5}
checkpoint: {every: 0}
run: {sample_tokens: 0, timeout_s: 60}
"""


def on_terminal(*words: str, **variables: str) -> tuple[int, int]:
    """Starts phalanx on a terminal of its own; returns the process and its end of the terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(variables)
        os.execv(sys.executable, [sys.executable, "-P", "-m", "phalanx", *words])
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 80, 0, 0))
    return pid, terminal


def until(terminal: int, words: str, seen: str = "") -> str:
    """Returns what was seen when `words` have come, which may have colours between them."""
    end = time.monotonic() + 120
    while words not in plain(seen):
        assert time.monotonic() < end, seen[-4000:]
        try:
            seen += os.read(terminal, 1 << 16).decode(errors="replace")
        except OSError:  # the last process has closed the terminal
            assert words in plain(seen), seen[-4000:]
    return seen


def plain(seen: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)


def test_the_view_and_ctrl_c(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    pid, terminal = on_terminal("train", "job.yaml", TERM="xterm-256color", NO_COLOR="")
    seen = until(terminal, "checkpoint  none yet")
    seen = until(terminal, "step: 5 ", until(terminal, "forward/backward", seen))
    os.kill(pid, signal.SIGINT)
    seen = until(terminal, "SIGINT: stopping after this step, with a checkpoint", seen)
    seen = until(terminal, "run the same command again", seen)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 75
    assert re.search(r"tps_total   [\d,]+\s", plain(seen))
    assert "\x1b[31mstep: 5\x1b" in seen, "log lines stay above the view, in torchtitan's colours"
    assert seen.rfind("\x1b[?25h") > seen.rfind("\x1b[?25l"), "the cursor is back"
    run = tmp_path / "runs" / "job"
    assert "went on" not in (run / "report.html").read_text()
    assert (run / "loss.svg").exists()
    log = (run / "logs" / "attempt_0" / "rank_0" / "stderr.log").read_text()
    assert "SIGINT: stopping after this step" in log
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["event"] for row in rows if row["event"] not in ("step", "traffic")] == ["start", "checkpoint", "end"]
    assert (rows[-1]["status"], rows[0]["device"], rows[0]["vocab_size"]) == ("stopped", "cpu", 13)
