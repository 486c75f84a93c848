"""torchtitan's own Llama in the plain loop: blocks compiled one by one, FSDP2 on one rank, a compiled loss.

    python -m benchmarks.gpu.torchtitan_llama --layers 6 --width 4096 --heads 32 --kv-heads 8 --hidden 14336 ...

The parts come from the installed wheel (0.2.2). What only its data code and its command line import may be absent.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
import types
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.gpu import loop

VERSION = "0.2.2"
NOT_NEEDED = ("datasets", "torchdata", "tyro")
"""Packages of its data code and command line."""


def missing() -> str:
    """Returns why torchtitan cannot be measured; empty if it can."""
    try:
        found = importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        return f"not installed: pip install --no-deps torchtitan=={VERSION}"
    return "" if found == VERSION else f"{found} is installed; its parts are taken from {VERSION}"


class Nothing:
    """Stands for whatever is imported from a package that is absent: can be called, decorate, annotate, be a base."""

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) else self

    def __getitem__(self, key: Any) -> Nothing:
        return self

    def __or__(self, other: Any) -> Any:
        return other

    __ror__ = __or__

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return ()


class Absent(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        return getattr(Nothing(), name)


class AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of packages that are not installed."""

    def __init__(self, packages: Sequence[str]):
        self.packages = packages

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".", maxsplit=1)[0] in self.packages or fullname in self.packages:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Does nothing: its names are made when they are asked for."""


def prepare() -> None:
    """Lets `torchtitan.models.llama3` be imported without what its packages import for data, tokenizers and experts."""
    found = importlib.util.find_spec("torchtitan")
    assert found, "missing() has looked for it"
    assert found.submodule_search_locations, "it is a package"
    (home,) = found.submodule_search_locations
    for name in ("torchtitan", "torchtitan.models", "torchtitan.models.llama3"):
        package = types.ModuleType(name)
        package.__path__ = [os.path.join(home, *name.split(".")[1:])]
        sys.modules[name] = package
    absent = ["torchtitan.components.metrics", *(name for name in NOT_NEEDED if importlib.util.find_spec(name) is None)]
    if importlib.util.find_spec("triton") is None:  # on a CPU: experts' kernels
        absent.append("torchtitan.models.moe")
    sys.meta_path.insert(0, AbsentFinder(absent))


class Loss(nn.Module):
    """torchtitan's model as one that returns its mean loss."""

    def __init__(self, model: nn.Module, *, compiled: bool):
        super().__init__()
        self.model = model
        self.loss = torch.compile(_mean_loss) if compiled else _mean_loss

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.model(tokens.contiguous()), targets.contiguous())


def _mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def model(dim: int, layers: int, heads: int, kv_heads: int, hidden: int, vocab: int, seq_len: int) -> nn.Module:
    """Returns torchtitan's Llama of a shape, on the meta device."""
    prepare()
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    shape = {"dim": dim, "n_layers": layers, "n_heads": heads, "n_kv_heads": kv_heads}
    widths = {"multiple_of": 1, "ffn_dim_multiplier": (hidden + 0.5) / int(2 * 4 * dim / 3)}
    with torch.device("meta"):
        made = Transformer(
            TransformerModelArgs(**shape, **widths, vocab_size=vocab, max_seq_len=seq_len, rope_theta=500000)
        )
    assert made.layers["0"].feed_forward.w1.out_features == hidden
    return made


def shard(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Applies torchtitan's FSDP2 to `model` and gives it its initial weights."""
    from torchtitan.models.llama3.infra.parallelize import apply_fsdp

    apply_fsdp(model, mesh, param_dtype=dtype, reduce_dtype=torch.float32, pp_enabled=False)
    model.to_empty(device=mesh.device_type)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device(mesh.device_type))


def make(options: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer]:
    on_gpu = options.device == "cuda"
    store = tempfile.NamedTemporaryFile(prefix="phalanx_gpu_")  # noqa: SIM115  # as long as the process
    dist.init_process_group("nccl" if on_gpu else "gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
    o = options
    llama = model(o.width, o.layers, o.heads, o.kv_heads, o.hidden, o.vocab, o.seq_len)
    if options.compile:
        from torchtitan.config.job_config import Compile
        from torchtitan.models.llama3.infra.parallelize import apply_compile

        apply_compile(llama, Compile(enable=True, components=["model", "loss"]))
    mesh = init_device_mesh(options.device, (1,), mesh_dim_names=("fsdp",))
    shard(llama, mesh, torch.bfloat16 if on_gpu else torch.float32)
    optimizer = torch.optim.AdamW(llama.parameters(), lr=loop.LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    return Loss(llama, compiled=options.compile), optimizer


if __name__ == "__main__":
    loop.main(__doc__, make, parts=True)
