"""The facts of a kind of attention or of a feed-forward layer: all that training, checking and prediction need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.blocks.operator import Operator
from phalanx.blocks.place import Place
from phalanx.config.model import ModelConfig
from phalanx.facts import Lazy, stated


class Connection(NamedTuple):
    """How tensor parallelism connects a layer to the residual stream, by the names of linear layers in its module
    (Shoeybi et al. 2019, section 3)."""

    reads: tuple[str, ...] = ()
    """Those that read the input, cut by rows. The module applies them through its `project`, all at once: the input is
    gathered, and its gradient is summed, once for all. None: a hook gathers the input of the whole module, and every
    rank computes what reads it."""
    writes: tuple[str, ...] = ()
    """Those that write the output, cut by columns. If there is one, it sums the ranks' outputs. Otherwise a hook sums
    the output of the whole module, to which only the first rank adds their biases."""


def no_problems(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yields nothing: any values of the model's fields will do."""
    yield from ()


def no_fields(model: ModelConfig, small: ModelConfig, max_ranks: int) -> ModelConfig:
    """Returns `small`: the kind has no fields of its own."""
    return small


@stated
@dataclass(frozen=True, kw_only=True)
class SublayerKind:
    """A kind of one of a block's two sub-layers, attention and feed-forward layer."""

    title: str
    """A few words for lists and messages."""
    source: str
    """The paper or model that it is from, with the section."""
    operators: Callable[[Place], Iterator[Operator]]
    """The description: yields the operators between the norm and the residual sum, in the order of the forward pass,
    with weights, products, saved tensors and messages. Parameter counts, tensor slices, FLOPs, memory, traffic and
    seconds are views of it."""
    module: Lazy
    """What makes the torch module on one device, "package.module:name", imported when a model is built. Its parameters
    are the description's weights, in the same order."""
    connection: Connection
    """How tensor parallelism connects the module to the residual stream."""
    name_in_block: str
    """The name of the module in a block, with which the names of its weights begin."""
    needs: tuple[str, ...] = ()
    """Fields of the model that it needs above 0, such as "mla.kv_rank". Kinds that do not need them refuse them."""
    problems: Callable[[ModelConfig], Iterator[tuple[str, str]]] = no_problems
    """Yields the dotted path of each wrong field of the model, and the message."""
    shrink: Callable[[ModelConfig, ModelConfig, int], ModelConfig] = no_fields
    """(model, small, max_ranks): returns `small`, which phalanx verify compares in place of a large `model`, with
    smaller values of this kind's own fields. Sizes stay divisible by the same numbers of ranks up to `max_ranks`."""


@stated
@dataclass(frozen=True, kw_only=True)
class AttentionKind(SublayerKind):
    """A kind of attention. `module` is called with (model, layer); its forward pass takes what that of
    `phalanx.model.attention.Attention` takes."""

    name_in_block: str = "attn"
    cores: tuple[str, ...]
    """The names of the CoreAttention modules in its module, outside which tokens do not meet: selective recomputation
    repeats them, and context parallelism replaces them. None: no rank may hold a part of a sequence."""


@stated
@dataclass(frozen=True, kw_only=True)
class FeedForwardKind(SublayerKind):
    """A kind of feed-forward layer. `module` is called with (model, layer, routing); its forward pass maps (batch, seq,
    d_model) to the same shape, each token by itself."""

    name_in_block: str = "mlp"
    width: Callable[[ModelConfig], int]
    """The hidden width, which tensor parallelism cuts."""
    width_name: str = "MLP width"
    """That width in messages."""
    routed: bool = False
    """Whether it has routed experts, which expert parallelism distributes: weights named "moe.experts.…". The first
    `moe.n_dense_layers` layers are dense. Its forward pass takes Conversations (phalanx.model.documents) or None, too:
    what its router counts besides choosing experts."""
