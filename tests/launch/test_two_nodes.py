"""Two machines under torchrun whose link fails, as network namespaces: `make faults`, as root."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    "PHALANX_FAULTS" not in os.environ or os.geteuid() != 0 or shutil.which("ip") is None,
    reason="minutes, root and network namespaces; set PHALANX_FAULTS=1 to run it",
)

HANG_S = 8.0
JOB = f"""
model: {{n_layers: 1, d_model: 16, n_heads: 2, seq_len: 16}}
cluster: {{peak_tflops: 1.0}}
layout: {{dp_replicate: 4}}
data: {{corpus: random, random_tokens: 5000, random_vocab: 13}}
train: {{steps: 1000000, global_batch: 4, eval_samples: 0, log_every: 50}}
run: {{sample_tokens: 0, timeout_s: 300, hang_s: {HANG_S}}}
"""


@dataclass
class TwoNodes:
    """Two network namespaces with a link between them."""

    prefix: str
    net: str = "10.78.0"

    def name(self, node: str) -> str:
        return f"{self.prefix}-{node}"

    def ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    def up(self) -> None:
        for node in "ab":
            self.ip("netns", "add", self.name(node))
            self.ip("-n", self.name(node), "link", "set", "lo", "up")
        link = ["link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", self.name("b")]
        self.ip("-n", self.name("a"), *link)
        for number, node in enumerate("ab", 1):
            self.ip("-n", self.name(node), "addr", "add", f"{self.net}.{number}/24", "dev", "eth0")
            self.ip("-n", self.name(node), "link", "set", "eth0", "up")

    def down(self) -> None:
        for node in "ab":
            with suppress(subprocess.CalledProcessError):
                self.ip("netns", "del", self.name(node))

    def start(self, node: str, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        name = self.name(node)
        inside = ["unshare", "--uts", "--kill-child", "sh", "-c", f'hostname {name}; exec "$@"', "-", *command]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        with log.open("wb") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", name, *inside], stdout=file, stderr=subprocess.STDOUT, env=environment
            )

    def cut(self) -> None:
        """The link goes down: unreachable."""
        self.ip("-n", self.name("a"), "link", "set", "eth0", "down")

    def mend(self) -> None:
        self.ip("-n", self.name("a"), "link", "set", "eth0", "up")

    def lose(self) -> None:
        """What a sends is lost, silently; what b sends arrives."""
        lost = ["lladdr", "02:00:00:00:00:01", "nud", "permanent", "dev", "eth0"]
        self.ip("-n", self.name("a"), "neigh", "replace", f"{self.net}.2", *lost)


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    made = TwoNodes(f"ph{os.getpid()}")
    made.up()
    yield made
    made.down()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("fault", ["cut", "lose"])
def test_each_node_ends_its_ranks_and_names_those_of_the_other(nodes: TwoNodes, tmp_path: Path, fault: str) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    torchrun += ["--master-addr", f"{nodes.net}.1", "--master-port", "29500"]
    ours = ["-m", "phalanx", "train", str(tmp_path / "job.yaml"), f"run.dir={tmp_path}", "run.name=run"]
    logs = {node: tmp_path / f"{node}.log" for node in "ab"}
    agents = [
        nodes.start(node, [*torchrun, "--node-rank", str(number), *ours], logs[node])
        for number, node in enumerate("ab")
    ]
    try:
        wait_for(lambda: "step: 50 " in logs["a"].read_text(), 120)
        began = time.time()
        getattr(nodes, fault)()
        reports = tmp_path / "run/logs/attempt_0"
        wait_for(lambda: len(list(reports.glob("hang.*.txt"))) == 2, 60)
        for agent in agents:
            assert agent.wait(60) != 0
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    for node, others, theirs in (("a", [2, 3], nodes.name("b")), ("b", [0, 1], nodes.name("a"))):
        report = reports / f"hang.{nodes.name(node)}.json"
        found = json.loads(report.read_text())
        print(f"{fault}, node {node}: ranks killed {found['time'] - began:.1f} s after the fault")
        assert (found["kind"], found["culprits"]) == ("unseen", others)
        assert f"on {theirs}" in found["message"]


@pytest.mark.timeout(240)
def test_replicas_on_a_node_that_is_cut_off_are_left_out_and_come_back(nodes: TwoNodes, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    words = [f"run.dir={tmp_path}", "run.name=run", "run.hang_s=0", "run.node_lost_s=2", "run.min_replicas=1"]
    words += ["run.nnodes=2", "cluster.nodes=2", f"run.rdzv_endpoint={nodes.net}.1:29400"]
    command = [sys.executable, "-m", "phalanx", "train", str(tmp_path / "job.yaml"), *words, "--oversubscribe"]
    logs = {node: tmp_path / f"{node}.log" for node in "ab"}
    launchers = [nodes.start(node, command, logs[node]) for node in "ab"]
    metrics = tmp_path / "run/metrics.jsonl"

    def changes() -> list[list[int]]:
        lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []  # the last one may still be written
        rows = [json.loads(line) for line in lines]
        return [row["members"] for row in rows if row["event"] == "replicas"]

    try:
        wait_for(lambda: "step: 50 " in logs["a"].read_text(), 120)
        nodes.cut()
        wait_for(lambda: sorted(changes()[-1]) == [0, 1], 60)
        nodes.mend()
        wait_for(lambda: sorted(changes()[-1]) == [0, 1, 2, 3], 60)
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
        print({node: log.read_text() for node, log in logs.items()})
    assert f"node {nodes.name('b')} is lost: nothing was heard from it for 2 s" in logs["a"].read_text()
    assert "the replicas of this node were ended: there is no connection to the host" in logs["b"].read_text()


def wait_for(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.timeout(240)
def test_a_slow_link_shows_in_the_matrix_of_pairs(nodes: TwoNodes, tmp_path: Path) -> None:
    for node in "ab":
        shape = ["tbf", "rate", "200mbit", "burst", "256kb", "latency", "200ms"]
        inside = ["ip", "netns", "exec", nodes.name(node), "tc", "qdisc", "add", "dev", "eth0", "root", *shape]
        subprocess.run(inside, check=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    torchrun += ["--master-addr", f"{nodes.net}.1", "--master-port", "29500"]
    ours = ["-m", "phalanx", "test-dist", "--quick", f"--traces={tmp_path}", f"--html={tmp_path}/page.html", "--json"]
    logs = {node: tmp_path / f"{node}.log" for node in "ab"}
    agents = [
        nodes.start(node, [*torchrun, "--node-rank", str(number), *ours], logs[node])
        for number, node in enumerate("ab")
    ]
    try:
        assert [agent.wait(200) for agent in agents] == [0, 0], logs["a"].read_text()
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    text = logs["a"].read_text()
    found = json.loads(text[text.index("\n{\n") : text.rindex("\n}") + 2])
    assert found["hosts"] == [nodes.name("a")] * 2 + [nodes.name("b")] * 2
    gbs = found["pairs"]["gbs"]
    # On a busy machine the time is up before the last pair.
    between, within = (
        [rate for rate in rates if rate] for rates in ((*gbs[0][2:], *gbs[1][2:]), (gbs[0][1], gbs[2][3]))
    )
    assert max(between) < 0.1, "200 Mbit/s are 0.025 GB/s, and a burst"
    assert max(within) > max(between)
    assert (tmp_path / "page.html").exists()
