"""Blocks that torch.compile compiles, those of a kind by the same graphs, and the folder where the graphs are kept."""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import platform
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._triton import has_triton

from phalanx.blocks.kinds import block_kinds
from phalanx.config.calibration import processor
from phalanx.model.layers import Run, RunCheap, prepare_compiler, run
from phalanx.model.moe import MixtureOfExperts
from phalanx.model.transformer import Block, Transformer

FOLDER = "TORCHINDUCTOR_CACHE_DIR"
"""The variable from which torch reads where it keeps what it compiles."""

log = logging.getLogger(__name__)


def missing(device: torch.device) -> str:
    """Returns what torch lacks to compile for a device, or nothing."""
    return "" if device.type == "cpu" or has_triton() else "torch finds no Triton for this GPU"


def compile_blocks(model: Transformer, *, exchanged: bool = False) -> int:
    """Compiles the blocks, embedding and final norm of a model; with `exchanged` rows of experts their activations,
    too, which stand beside all-to-alls. Returns the number of kinds of blocks."""
    import torch._dynamo  # two seconds, for those who compile

    prepare_compiler()
    kinds = len({(kind, model.config.window_of(layer)) for layer, kind in enumerate(block_kinds(model.config))})
    # The compiler's limit is per function, which all kinds of blocks share: with and without gradients, and again where
    # lengths change.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 8 * kinds)
    for block in model.blocks.values():
        assert isinstance(block, Block), "nothing wraps blocks before this"
        block.run = CompiledRun(block.run, torch.compile(_compute))
    if exchanged:
        for module in model.modules():
            if isinstance(module, MixtureOfExperts):
                for mlp in (module.experts, module.shared):
                    if mlp is not None and "run_cheap" not in vars(mlp):
                        mlp.run_cheap = fused()
    model.embed_tokens, model.normed = torch.compile(model.embed_tokens), torch.compile(model.normed)
    return kinds


@cache
def fused() -> RunCheap:
    """Returns `run`, compiled for any number of rows, also for as many as there are columns."""
    import torch.fx.experimental._config as shapes  # with torch._dynamo, two seconds

    shapes.use_duck_shape = False  # sizes that happen to be equal stay two
    return torch.compile(run, dynamic=True)


@dataclass(frozen=True)
class CompiledRun:
    """The `run` of a block that is compiled: the graph is what the `run` that it replaces calls, and computes again."""

    outer: Run
    compiled: Run

    def __call__(self, compute: Callable[..., Tensor], *inputs: Any) -> Tensor:
        return self.outer(partial(self.compiled, compute), *inputs)


def _compute(compute: Callable[..., Tensor], *inputs: Any) -> Tensor:
    return compute(*inputs)


def keep_compiled() -> None:
    """Makes torch keep what it compiles in the user's cache folder, from which later processes read it: several may
    write, as torch replaces whole files. It holds code that runs: a folder that others can write is not used, and what
    is compiled goes to a temporary one."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    stated = os.environ.get(FOLDER, "")  # by the user, or by torch, which sets it when its compiler is imported
    folder = _own_folder(os.environ) if stated in ("", default_cache_dir()) else Path(stated)
    if reason := _refused(folder):
        log.warning("compile: nothing is kept for the next start: %s %s", folder, reason)
        folder = Path(tempfile.mkdtemp(prefix="phalanx-compiled-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ[FOLDER] = str(folder)


def _own_folder(env: Mapping[str, str]) -> Path:
    """Returns a folder in $XDG_CACHE_HOME, by default ~/.cache: torch's keys name graphs, its own sources and GPUs, but
    neither the processor nor Python."""
    base = Path(env.get("XDG_CACHE_HOME", ""))  # the specification ignores relative paths
    base = base if base.is_absolute() else Path.home() / ".cache"
    machine = hashlib.sha256(f"{platform.machine()} {processor()}".encode()).hexdigest()[:8]
    return base / "phalanx" / "compiled" / f"torch-{torch.__version__}-python-{platform.python_version()}-{machine}"


def _refused(folder: Path) -> str:
    """Makes a folder that only this user can enter, with those above it. Returns why it is not used, or nothing."""
    try:
        for each in reversed((folder, *folder.parents)):
            each.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return "belongs to another user"
        if found.st_mode & 0o022:
            return "can be written by others (chmod go-w)"
        for above in folder.resolve().parents:
            mode = above.stat().st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                return f"is in {above}, which everyone can write"
        return "" if os.access(folder, os.W_OK | os.X_OK) else "cannot be written"
    except OSError as error:
        return f"cannot be made: {error.strerror}"
