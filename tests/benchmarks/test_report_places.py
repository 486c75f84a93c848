"""Published results name no folder of the machine."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.report import RESULTS, without_places


def test_no_folder_of_the_machine_is_left():
    root = RESULTS.parents[1]
    text = f'"{root}/.venv/bin/python", "{tempfile.gettempdir()}/x", "{sys.base_prefix}/lib", "{Path.home()}/y"'
    assert without_places(text) == '"./.venv/bin/python", "$TMPDIR/x", "$PYTHON/lib", "~/y"'


def test_committed_results_name_none():
    for path in RESULTS.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert not [word for word in ('"/home/', '"/root/', "/site-packages/phalanx", '"/tmp/') if word in text], path
