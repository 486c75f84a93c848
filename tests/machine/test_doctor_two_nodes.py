"""Two machines compared, as network namespaces: `make faults`, as root."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.test_two_nodes import TwoNodes

pytestmark = pytest.mark.skipif(
    "PHALANX_FAULTS" not in os.environ or os.geteuid() != 0 or shutil.which("ip") is None,
    reason="root and network namespaces; set PHALANX_FAULTS=1 to run it",
)
NET = "10.79.0"
JOB = """
model: {n_layers: 1, d_model: 16, n_heads: 2, seq_len: 16}
layout: {dp_replicate: 2}
data: {corpus: random, random_tokens: 5000, random_vocab: 13}
train: {steps: 4, global_batch: 4}
"""


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    made = TwoNodes(f"dr{os.getpid()}", NET)
    made.up()
    yield made
    made.down()


@pytest.fixture
def compared(nodes: TwoNodes, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """`compared(before)`: rank 0's exit code and the lines about both nodes, after the shell's `before` on node b."""

    def run(before: str = "true") -> tuple[int, dict[str, Any]]:
        (tmp_path / "job.yaml").write_text(JOB)
        (tmp_path / "runs").mkdir()
        words = ["doctor", str(tmp_path / "job.yaml"), f"run.dir={tmp_path / 'runs'}", "--json", "--timeout", "5"]
        logs = {node: tmp_path / f"{node}.json" for node in "ab"}
        started = []
        for rank, node in enumerate("ab"):
            ranks = f"RANK={rank} WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR={NET}.1 MASTER_PORT=29500"
            ours = f"{ranks} exec {sys.executable} -m phalanx {' '.join(words)} 2>{logs[node]}.err"
            script = f"{before if node == 'b' else 'true'} && {ours}"
            started.append(nodes.start(node, ["unshare", "-m", "sh", "-c", script], logs[node]))
        codes = [process.wait(200) for process in started]
        found = json.loads(logs["a"].read_text())["findings"]
        return codes[0], {line["check"]: line for line in found if line["group"] == "nodes"}

    return run


def test_two_nodes_that_agree(compared) -> None:
    code, lines = compared()
    assert code == 0, lines
    assert lines["reachability"]["text"] == "2 connections between 2 nodes"
    assert {line["status"] for line in lines.values()} == {"OK"}


def test_a_node_with_another_disk_and_another_interface(compared, tmp_path: Path) -> None:
    code, lines = compared(f"mount -t tmpfs none {tmp_path / 'runs'} && export GLOO_SOCKET_IFNAME=lo")
    assert code == 1
    assert [line["hosts"][0][-1] for line in (lines["run directory"], lines["reachability"])] == ["b", "a"]
    assert "does not reach" in lines["reachability"]["text"]
    assert lines["process group"]["status"] == "ERROR"


def test_a_node_with_other_source_files(compared, tmp_path: Path) -> None:
    import phalanx

    copy = tmp_path / "copy"
    shutil.copytree(Path(phalanx.__file__).parent, copy / "phalanx", ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "phalanx" / "units.py").open("a") as file:
        file.write("# edited\n")
    code, lines = compared(f"export PYTHONPATH={copy}")
    assert code == 1
    assert "phalanx source" in lines["same program"]["text"]
