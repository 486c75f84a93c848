"""`make setup` takes torch's CPU build where there is no GPU and its index answers, and never waits long for it."""

import importlib.util
import sys
import time
from pathlib import Path

import pytest

import phalanx

SCRIPT = Path(phalanx.__file__).parents[2] / ".ci" / "torch_index.py"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="the package is installed without its repository")


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("torch_index", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_index_of_ones_own_is_kept(script, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.invalid/simple")
    assert script.has_own_index(sys.executable)
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    assert not script.has_own_index(sys.executable)


def test_an_index_that_hangs_is_not_waited_for(script, monkeypatch):
    monkeypatch.setattr(script, "SECONDS", 0.3)
    monkeypatch.setattr(script, "PROBE", "import time; time.sleep(60)")
    began = time.monotonic()
    assert not script.answers()
    assert time.monotonic() - began < 10
    monkeypatch.setattr(script, "PROBE", "raise OSError")
    monkeypatch.setattr(script, "SECONDS", 30)
    assert not script.answers()
    monkeypatch.setattr(script, "PROBE", "pass")
    assert script.answers()
