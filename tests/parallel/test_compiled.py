"""What torch compiles is kept in the user's cache folder, and a folder that others can write is not used."""

import logging
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from phalanx.config.job import Job, Train
from phalanx.config.model import ModelConfig
from phalanx.launch.ranks import Ranks
from phalanx.model.transformer import Transformer
from phalanx.parallel.apply import apply
from phalanx.parallel.compiled import FOLDER, keep_compiled
from phalanx.parallel.mesh import alone
from phalanx.parallel.objective import MicroTensors

ALL = bool(os.environ.get("PHALANX_COMPILE"))
SHAPE = ModelConfig(n_layers=1, d_model=16, n_heads=2, seq_len=8)


def found_in_cache(ranks: Ranks, home: str) -> dict[str, int]:
    """Computes with a compiled model on the first rank, then on the second. Returns how often each found a graph."""
    import torch._inductor.config as inductor
    from torch._dynamo.utils import counters

    inductor.compile_threads, inductor.cpp_cache_precompile_headers = 1, False
    os.environ.pop(FOLDER, None)
    os.environ["XDG_CACHE_HOME"] = home
    for turn in range(2):
        if ranks.rank == turn:
            with torch.device("meta"):
                model = Transformer(SHAPE, 11)
            replica = apply(model, Job(SHAPE, train=Train(compile=True)), alone(), torch.device("cpu"))
            counters.clear()
            tokens = torch.arange(16).reshape(2, 8) % 11
            if ALL:
                replica.forward_backward(MicroTensors(tokens, tokens, None), 1.0, last=True)
            else:
                with torch.no_grad():
                    replica.objective.model.normed(torch.ones(2, 8, SHAPE.d_model))
        dist.barrier()
    return dict(counters["inductor"])


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile builds its CPU kernels with g++, which is not here")
def test_a_second_process_finds_every_graph(ranks, tmp_path):
    """`make compiled` compiles a whole step, the suite a norm."""
    first, second = ranks(found_in_cache, 2, str(tmp_path), timeout=600)
    assert first["fxgraph_cache_miss"] > 0
    assert (second["fxgraph_cache_hit"], second.get("fxgraph_cache_miss", 0)) == (first["fxgraph_cache_miss"], 0)
    (folder,) = (tmp_path / "phalanx" / "compiled").iterdir()
    assert folder.name.startswith(f"torch-{torch.__version__}-python-3.")
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("stated", ["", default_cache_dir()])
def test_the_folder_is_the_users_own(cache, monkeypatch, stated):
    monkeypatch.setenv(FOLDER, stated)
    keep_compiled()
    folder = Path(os.environ[FOLDER])
    assert folder.parent == cache / "phalanx" / "compiled"
    assert {each.stat().st_mode & 0o777 for each in (folder, *folder.parents[:2])} == {0o700}
    monkeypatch.setenv(FOLDER, str(cache / "mine"))  # as a user sets it
    keep_compiled()
    assert os.environ[FOLDER] == str(cache / "mine")


@pytest.mark.parametrize(
    ("mode", "above", "why"),
    [(0o770, 0o700, "can be written by others"), (0o700, 0o777, "is in .*, which everyone can write")],
)
def test_code_is_not_read_from_where_others_write(cache, caplog, monkeypatch, mode, above, why):
    folder = cache / "above" / "kept"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    folder.parent.chmod(above)
    monkeypatch.setenv(FOLDER, str(folder))
    caplog.set_level(logging.WARNING, "phalanx")
    keep_compiled()
    (record,) = caplog.records
    assert record.getMessage().startswith(f"compile: nothing is kept for the next start: {folder} ")
    assert re.search(why, record.getMessage())
    assert Path(os.environ[FOLDER]).stat().st_mode & 0o777 == 0o700
    assert os.environ[FOLDER] != str(folder)


def test_a_file_or_a_link_is_no_folder(cache, caplog, monkeypatch):
    (cache / "file").write_text("")
    (cache / "link").symlink_to(cache, target_is_directory=True)
    for name in ("file", "link"):
        monkeypatch.setenv(FOLDER, str(cache / name))
        keep_compiled()
        assert os.environ[FOLDER] != str(cache / name)
    assert len(caplog.records) == 2
