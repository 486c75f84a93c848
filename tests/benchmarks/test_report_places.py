"""Published results name no folder of the machine."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.chaos.bench import without_root
from benchmarks.report import RESULTS, without_places


def test_no_folder_of_the_machine_is_left():
    root = RESULTS.parents[1]
    text = f'"{root}/.venv/bin/python", "{tempfile.gettempdir()}/x", "{sys.base_prefix}/lib", "{Path.home()}/y"'
    assert without_places(text) == '"./.venv/bin/python", "$TMPDIR/x", "$PYTHON/lib", "~/y"'


def test_no_folder_of_a_fault_is_left():
    root = Path(tempfile.gettempdir()) / "phalanx_chaos_x1y2" / "phalanx" / "faults" / "16-becomes-read-only"
    told = f"{root / 'work'}/runs/chaos/logs/stderr.log cannot be written; {root}/tmp/x is full"
    found = without_root({"told": told, "reasons": [told], "seconds": 3.5}, root)
    expected = "runs/chaos/logs/stderr.log cannot be written; tmp/x is full"
    assert found == {"told": expected, "reasons": [expected], "seconds": 3.5}


def test_committed_results_name_none():
    places = ('"/home/', '"/root/', "/site-packages/phalanx", '"/tmp/', "/phalanx_chaos_")
    for path in (*RESULTS.glob("*.json"), *RESULTS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        assert not [word for word in places if word in text], path
