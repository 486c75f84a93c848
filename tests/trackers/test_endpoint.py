"""The Prometheus endpoint of a run."""

from __future__ import annotations

import json
import re
import socket
import urllib.error
import urllib.request
from dataclasses import replace

import pytest

from phalanx.check.job import problems_of
from phalanx.config.job import Data, Job, RunOptions, Train
from phalanx.config.model import ModelConfig
from phalanx.errors import RunError
from phalanx.launch.ranks import SINGLE
from phalanx.trackers.processes import CONTENT_TYPE, MetricsEndpoint
from phalanx.train.loop import Trainer
from phalanx.train.rank import train

ROWS = [
    {"event": "start", "time": 1.0, "step": 0, "layout": "tp=2", "devices": 2},
    {"event": "step", "time": 2.0, "step": 1, "loss": 3.5, "grad_norm": None, "source_tokens": {'a"b\\c': 7}},
    {"event": "step", "time": 3.0, "step": 2, "loss": 3.25, "memory": 1024},
    {"event": "validation", "time": 3.0, "step": 2, "val_loss": 3.0, "seconds": 0.5},
    {"event": "gpu", "time": 3.0, "step": 2, "power_w": {"0": 512.5, "1": 498}},
    {"event": "traffic", "time": 4.0, "step": 2, "traffic_bytes": {"tp": {"all_reduce": 64.0}}},
    {"event": "end", "time": 4.0, "step": 2, "status": "finished", "ok": True},
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def read(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        assert answer.headers["Content-Type"] == CONTENT_TYPE
        return answer.read().decode()


def job_of(port: int, **options) -> Job:
    return Job(run=RunOptions(name='a"b', metrics_port=port, **options))


def write(path, rows) -> None:
    with (path / "metrics.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)


def test_the_newest_figures_are_told_in_the_text_format(tmp_path):
    port = free_port()
    with MetricsEndpoint(job_of(port), tmp_path) as endpoint:
        endpoint.listen()
        assert read(port) == '# TYPE phalanx_info gauge\nphalanx_info{run="a\\"b",layout="dp_replicate=1"} 1\n'
        write(tmp_path, ROWS[:2])
        first = read(port)
        assert 'phalanx_grad_norm{run="a\\"b"} NaN\n' in first
        assert 'phalanx_source_tokens{run="a\\"b",source="a\\"b\\\\c"} 7\n' in first
        write(tmp_path, ROWS[2:])
        text = read(port, "/metrics?x=1")
        for line in (
            'phalanx_step{run="a\\"b"} 2',
            'phalanx_loss{run="a\\"b"} 3.25',
            'phalanx_memory{run="a\\"b"} 1024',
            'phalanx_val_loss{run="a\\"b"} 3.0',
            'phalanx_validation_seconds{run="a\\"b"} 0.5',
            'phalanx_gpu_power_w{run="a\\"b",gpu="1"} 498',
            'phalanx_traffic_traffic_bytes{run="a\\"b",axis="tp",collective="all_reduce"} 64.0',
        ):
            assert f"\n{line}\n" in text
        assert "status" not in text
        sample = r'[a-z_]+\{[a-z]+="([^"\\]|\\["\\n])*"(,[a-z]+="([^"\\]|\\["\\n])*")*\} (NaN|[-+0-9.e]+)'
        assert all(re.fullmatch(rf"# TYPE [a-z_]+ gauge|{sample}", line) for line in text.splitlines())
        names = re.findall(r"# TYPE (\w+)", text)
        assert len(names) == len(set(names))
        with pytest.raises(urllib.error.HTTPError, match="404"):
            read(port, "/etc/passwd")
    with pytest.raises(urllib.error.URLError):
        read(port)


def test_a_port_that_is_taken_is_one_message(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with (
            MetricsEndpoint(job_of(port), tmp_path) as endpoint,
            pytest.raises(RunError, match=f"run.metrics_port={port}: no listener on 127.0.0.1: Address already in use"),
        ):
            endpoint.listen()


def test_an_address_of_another_machine_is_one_message(tmp_path):
    with (
        MetricsEndpoint(job_of(free_port(), metrics_host="no.such.host.invalid"), tmp_path) as endpoint,
        pytest.raises(RunError, match="no listener on no.such.host.invalid"),
    ):
        endpoint.listen()


def test_a_port_out_of_range_is_refused():
    [(path, message)] = problems_of(job_of(70000))
    assert path == "run.metrics_port"
    assert "must lie between 0 and 65535" in message


def test_a_run_tells_its_figures_until_it_ends(tmp_path, monkeypatch):
    port, told = free_port(), list[str]()
    plain = Trainer._summary
    monkeypatch.setattr(Trainer, "_summary", lambda self, *args: told.append(read(port)) or plain(self, *args))
    job = Job(
        model=ModelConfig(n_layers=1, d_model=8, n_heads=2, seq_len=8),
        data=Data(corpus="random", random_tokens=2000, random_vocab=13, dir=str(tmp_path / "data")),
        train=Train(steps=2, global_batch=2, eval_samples=2),
        run=RunOptions(name="run", dir=str(tmp_path / "runs"), sample_tokens=0, metrics_port=port, report=False),
    )
    (tmp_path / "runs" / "run").mkdir(parents=True)
    summary = train(replace(job), SINGLE, None)
    assert f'phalanx_step{{run="run"}} {summary["step"]}\n' in told[0]
    assert 'phalanx_tps_total{run="run"} ' in told[0]
    assert re.search(r'phalanx_info\{run="run",layout="dp_replicate=1"\} 1', told[0])
    with pytest.raises(urllib.error.URLError):
        read(port)
