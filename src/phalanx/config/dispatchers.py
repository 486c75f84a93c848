"""The table of dispatchers: what `layout.dispatch` may name, the ways of tokens to their experts. Their code is in
parallel/."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from phalanx.facts import Lazy, stated
from phalanx.registry import Registry


@stated
@dataclass(frozen=True)
class DispatcherEntry:
    """A way of tokens to the ranks that hold their experts, and back."""

    title: str
    """One-line description."""
    source: str
    """Paper and section, or its library."""
    make: Lazy
    """`make(ep, near, far)` returns the `dispatch` of mixtures of experts (model/moe.py) over the axes of all expert
    ranks, of neighbours, and of the ranks at one place of every group of these (layout.ep_node)."""
    sends: Literal["rows", "tokens"]
    """The messages that prediction and rehearsal count: a row per token and expert, or each token once to every rank
    with some of its experts."""
    modules: tuple[str, ...] = ()
    """The modules that it imports, which must be installed."""
    install: str = ""
    """How to install them; needed with `modules`."""
    forwards: bool = False
    """Whether a token crosses to a node once, and is passed on to its ranks there."""
    device: Literal["any", "cuda"] = "any"
    """The only kind of devices that it runs on."""
    precisions: tuple[str, ...] = ()
    """The only values of train.precision whose activations it sends; empty: all."""
    cores: int = 0
    """Cores (SMs) that its kernels take from computation."""


def _entry_problems(name: str, entry: DispatcherEntry) -> Iterator[str]:
    """Yields the problems of an entry that is added."""
    if entry.modules and not entry.install:
        yield "install is missing: how its modules are installed, for a message where they are not"


DISPATCHERS = Registry(
    "dispatcher",
    {
        "rows": DispatcherEntry(
            "all-to-alls of a row per token and expert; with ep_node inside nodes, then between them",
            "Lepikhin et al. 2021, section 3; Rajbhandari et al. 2022",
            make="phalanx.parallel.expert:RowExchange",
            sends="rows",
        ),
        "tokens": DispatcherEntry(
            "an all-to-all that sends each token once per rank, where the outputs of its experts are summed",
            "DeepSeek-AI 2024, section 3.2.2",
            make="phalanx.parallel.expert:token_exchange",
            sends="tokens",
        ),
        "deepep": DispatcherEntry(
            "DeepEP's kernels: tokens once per node and once per rank inside, over NVLink and RDMA",
            "DeepEP, deepseek-ai/DeepEP",
            make="phalanx.parallel.deep_ep:DeepExchange",
            sends="tokens",
            modules=("deep_ep",),
            install="from github.com/deepseek-ai/DeepEP",
            forwards=True,
            device="cuda",
            precisions=("bf16", "fp8"),
            cores=20,
        ),
    },
    _entry_problems,
)
"""Dispatchers by name."""


def sends_tokens(name: str) -> bool:
    """Returns whether a dispatcher sends each token once."""
    return name != "rows" and DISPATCHERS[name].sends == "tokens"


def absent(name: str) -> str:
    """Returns which modules of a dispatcher are not installed here, and how they are; nothing is imported."""
    entry = DISPATCHERS[name]
    modules = [module for module in entry.modules if importlib.util.find_spec(module) is None]
    return f"needs {' and '.join(modules)}, not installed here ({entry.install})" if modules else ""
