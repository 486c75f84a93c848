"""The facts of a kind of attention or of a feed-forward layer, and the check that all of them are stated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from phalanx.blocks.operator import Operator
from phalanx.blocks.place import Place
from phalanx.config.model import ModelConfig


class Connection(NamedTuple):
    """How tensor parallelism connects a layer to the residual stream, by the names of linear layers in its module
    (Shoeybi et al. 2019, section 3)."""

    reads: tuple[str, ...] = ()
    """Those that read the input, cut by rows. The module applies them through its `project`, all at once: the input is
    gathered, and its gradient is summed, once for all. None: a hook gathers the input of the whole module, and every
    rank computes what reads it."""
    writes: str = ""
    """The one that writes the output, cut by columns; it sums the ranks' outputs. None: a hook sums the output of the
    whole module."""
    first_rank_biases: tuple[str, ...] = ()
    """Those that write a part of a module's output that a hook sums: only the first rank adds their bias."""


_NO_CONNECTION = Connection()


def _no_operators(place: Place) -> Iterator[Operator]:
    raise NotImplementedError


def _no_problems(model: ModelConfig) -> Iterator[tuple[str, str]]:
    yield from ()


def _no_fields(model: ModelConfig, small: ModelConfig, max_ranks: int) -> ModelConfig:
    return small


def _no_width(model: ModelConfig) -> int:
    raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class SublayerKind:
    """A kind of one of a block's two sub-layers, attention and feed-forward layer: everything that training,
    predictions, checks and the planner know of it."""

    place: str = ""
    """The name of its module in a block, with which the names of its weights begin."""

    name: str = ""
    """The name that a job writes."""
    title: str = ""
    """What it is, in a few words."""
    source: str = ""
    """The paper or model that it is from, with the section."""
    operators: Callable[[Place], Iterator[Operator]] = _no_operators
    """The description: yields the operators between the norm and the residual sum, in the order of the forward pass,
    with weights, products, saved tensors and messages. Parameter counts, tensor slices, FLOPs, memory, traffic and
    seconds are views of it."""
    module: str = ""
    """What makes the torch module on one device, "package.module:name", imported when a model is built. Its parameters
    are the description's weights, in the same order."""
    connection: Connection = _NO_CONNECTION
    """How tensor parallelism connects its module to the residual stream."""
    needs: tuple[str, ...] = ()
    """Fields of the model that it needs above 0, such as "mla.kv_rank". Other kinds refuse them."""
    problems: Callable[[ModelConfig], Iterator[tuple[str, str]]] = _no_problems
    """Yields the dotted path of each wrong field of the model, and the message."""
    shrink: Callable[[ModelConfig, ModelConfig, int], ModelConfig] = _no_fields
    """(model, small, max_ranks): returns `small`, which phalanx verify compares in place of a large `model`, with
    smaller values of this kind's own fields. Sizes stay divisible by the same numbers of ranks up to `max_ranks`."""


@dataclass(frozen=True, kw_only=True)
class AttentionKind(SublayerKind):
    """A kind of attention. `module` is called with (model, layer); its forward pass takes what
    `phalanx.model.attention.Attention` takes. Its weights are named "attn.…"."""

    cores: tuple[str, ...] = ()
    """The names of the CoreAttention modules in its module: selective recomputation repeats them, and context
    parallelism replaces them."""

    place: str = "attn"


@dataclass(frozen=True, kw_only=True)
class FeedForwardKind(SublayerKind):
    """A kind of feed-forward layer. `module` is called with (model, layer, routing); its forward pass maps (batch, seq,
    d_model) to the same shape, token by token."""

    place: str = "mlp"
    width: Callable[[ModelConfig], int] = _no_width
    """The hidden width, which tensor parallelism cuts."""
    width_name: str = "MLP width"
    """That width in messages."""
    routed: bool = False
    """Whether it has routed experts, which expert parallelism distributes: weights named "moe.experts.…". Layers before
    `moe.n_dense_layers` are dense."""


def missing_facts(kind: SublayerKind) -> Iterator[str]:
    """Yields every fact that a kind does not state."""
    facts: dict[str, tuple[Any, str]] = {
        "title": (kind.title, "what it is, in a few words"),
        "source": (kind.source, "the paper or model that it is from"),
        "operators": (kind.operators is not _no_operators, "a function that yields its operators at a place"),
        "module": (kind.module, 'what makes its torch module, "package.module:name"'),
        "connection": (kind.connection is not _NO_CONNECTION, "how tensor parallelism connects it"),
    }
    if isinstance(kind, FeedForwardKind):
        facts["width"] = kind.width is not _no_width, "its hidden width"
    yield from (f"{name} is missing: {meaning}" for name, (stated, meaning) in facts.items() if not stated)
