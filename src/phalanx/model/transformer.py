"""A decoder-only transformer of the GPT-2, Llama or DeepSeek kind, as one device would run it.

Nothing here knows of other devices. A layout changes parts from outside and by name: `embed`, `positions`, `blocks`,
`final_norm`, `head`; in a block `attn` with `wq`, `wk`, `wv`, `core`, `wo` (latent attention has names of its own), and
`mlp` with `up`, `gate`, `down`, or in its place `moe` with `router`, `experts`, `shared`, between `attn_norm` and
`attn_post_norm`, `mlp_norm` and `mlp_post_norm`; in the blocks of modules for further tokens also `join` before these
and `predict_norm` after them; with model.layer_embedding there is `layer_inputs` beside `embed`, and `layer_input` at
the end of each block; with model.layer_scale every block ends with `rescale`. The weights' shapes give the
numbers of heads and experts, so that a shard of a layer computes with its own part, and blocks are keyed by their
layer, so that a pipeline stage keeps the names of its blocks. Layers that read the same input are called together
(`qkv`, `widen`), so that a layout communicates once for all of them.

Shapes: batch, seq (tokens of the input), keys (tokens attended to: seq, or more with a cache), d_model, head_size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.blocks import residual as lora
from phalanx.blocks.kinds import (
    ATTENTION,
    FEED_FORWARD,
    AttentionKind,
    FeedForwardKind,
    SublayerKind,
    attention_models,
    block_kinds,
    model_for,
    not_trained,
)
from phalanx.blocks.operator import Half, Place
from phalanx.blocks.parameters import Shapes, vocabulary, weight_of
from phalanx.blocks.residual import head_rows
from phalanx.check.model import model_problems
from phalanx.config.model import ModelConfig
from phalanx.errors import ExtensionError, JobError
from phalanx.model.attention import CoreAttention, KeysAndValues, SharedKeys
from phalanx.model.cache import Cache
from phalanx.model.documents import Conversations, Documents
from phalanx.model.layers import (
    LayerInput,
    LayerInputs,
    Linear,
    Multiply,
    Rescale,
    RMSNorm,
    Run,
    make_norm,
    query_growth,
    rotary_table,
    run,
    soft_cap,
    uncompiled,
)
from phalanx.model.moe import GroupedLinear, Routing
from phalanx.model.seeding import Noise, dropout, perturbed
from phalanx.registry import Registry


def make_sublayer(
    table: Registry[AttentionKind] | Registry[FeedForwardKind], name: str, model: ModelConfig, layer: int, *more: object
) -> nn.Module:
    """Returns the module of the kind `name` for block `layer`; `more` are further arguments of what makes it.

    Raises ExtensionError if there is none, or if it is not the one that the kind describes."""
    kind = table[name]
    made: nn.Module = table.code(name, "module")(model, layer, *more)
    problems = [*_other_parameters(kind, model, made), *_other_modules(kind, made)]
    if problems := problems or list(_add_adapters(kind, model, made)):
        raise ExtensionError([f"{table.kind} {name!r}: {problem}" for problem in problems])
    return made


def _add_adapters(kind: SublayerKind, model: ModelConfig, made: nn.Module) -> Iterator[str]:
    """Gives the linear layers that are targets their adapters. Yields those that are no linear layers."""
    half: Half = "attention" if isinstance(kind, AttentionKind) else "feed_forward"
    for name in dict.fromkeys(lora.targets(Place(model), half, kind.operators(Place(model)))):
        layer = made.get_submodule(name.removeprefix(f"{kind.name_in_block}."))
        if isinstance(layer, Linear | GroupedLinear):
            layer.add_adapter(model.lora.rank, model.lora.scale)
        else:
            yield f"model.lora: {name} of its module must be a Linear of phalanx.model.layers to have an adapter"


def _other_parameters(kind: SublayerKind, model: ModelConfig, made: nn.Module) -> Iterator[str]:
    """Yields the differences between the weights of a description and the parameters of a module."""
    operators, prefix = kind.operators(Place(model)), kind.name_in_block
    described: Shapes = {weight.name: weight.shape for operator in operators for weight in operator.weights}
    held: Shapes = {f"{prefix}.{name}": tuple(parameter.shape) for name, parameter in made.named_parameters()}
    yield from (f"its module lacks the weight {name} {described[name]}" for name in described if name not in held)
    yield from (f"its operators lack the parameter {name} {held[name]}" for name in held if name not in described)
    for name in described:
        if name in held and held[name] != described[name]:
            yield f"{name} is {described[name]} in its operators and {held[name]} in its module"
    if described == held and list(described) != list(held):
        yield f"its operators have the weights in the order {', '.join(described)}, its module {', '.join(held)}"


def _other_modules(kind: SublayerKind, made: nn.Module) -> Iterator[str]:
    """Yields the submodules that a kind names and a module does not have so."""
    named = dict(made.named_modules())
    if kind.connection.reads and not hasattr(made, "project"):
        yield f"its module applies {', '.join(kind.connection.reads)}, which read the input, without a `project`"
    for name in (*kind.connection.reads, *kind.connection.writes):
        if not isinstance(named.get(name), Linear | GroupedLinear | None):
            yield f"{name} of its module must be a Linear of phalanx.model.layers, is {type(named[name]).__name__}"
    if isinstance(kind, AttentionKind):
        cores = [name for name, module in named.items() if isinstance(module, CoreAttention)]
        if sorted(cores) != sorted(kind.cores):
            yield f"it states the cores {list(kind.cores)}, its module has {cores}"


class Transformer(nn.Module):
    """The whole model: embeddings, blocks, final norm and head.

    `vocab_size` is the tokenizer's, used if the model's shape leaves it open. The parameters are exactly those of
    `phalanx.blocks.parameters.parameter_shapes`; `phalanx.model.seeding.initialise` sets their values. Raises JobError
    for an invalid shape."""

    def __init__(self, model: ModelConfig, vocab_size: int | None = None):
        super().__init__()
        problems = [f"{path}: {message}" for path, message in model_problems(model)]
        if problems := problems or [*filter(None, [not_trained(model)])]:
            raise JobError(problems)
        vocab = vocabulary(model, vocab_size)
        self.config = model
        kinds = block_kinds(model)
        self.rotary_sizes = [model_for(model, kind.attention).rotary_size for kind in kinds]
        """Elements of each layer's heads that rotary positions turn."""
        without_keys = range(model.n_layers - model.shared_keys, model.n_layers)
        self.key_sources = {layer: model.keys_of(layer) for layer in without_keys}
        """The layers whose keys others read, by those."""
        self.embed = Embedding(vocab, model.d_model)
        # The factor has the precision of the activations, as when Gemma was trained: 55.5 in bf16, not 55.43.
        factor = model.embedding_multiplier * (model.d_model**0.5 if model.scaled_embedding else 1)
        dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        self.embedding_scales = {dtype: torch.tensor(factor, dtype=dtype, device="cpu").item() for dtype in dtypes}
        self.positions = PositionEmbedding(model.seq_len, model.d_model) if model.positions == "learned" else None
        self.layer_inputs = LayerInputs(model) if model.layer_embedding else None
        self.routing = Routing()
        blocks = {str(layer): Block(model, layer, self.routing) for layer in range(model.n_layers)}
        self.blocks = nn.ModuleDict(blocks)
        self.final_norm = make_norm(model)
        self.head = Head(model, head_rows(model, vocab))
        self.gather: Callable[[Tensor], Tensor] | None = None
        """Makes a normalised output the head's input, where a layout needs it."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not weight_of(model, name).frozen)

    def forward(
        self,
        tokens: Tensor,
        *,
        noise: Noise | None = None,
        cache: Cache | None = None,
        positions: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Returns logits (batch, seq, vocab) of `tokens` (batch, seq). The arguments are those of `hidden`."""
        x = self.hidden(tokens, noise=noise, cache=cache, positions=positions, documents=documents)
        return self.logits(self.gathered(self.normed(x)))

    def hidden(
        self,
        tokens: Tensor,
        *,
        noise: Noise | None = None,
        cache: Cache | None = None,
        positions: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Returns the last block's output, (batch, seq, d_model), for `tokens` (batch, seq).

        `noise` switches dropout on; `cache` holds the earlier tokens and appends these; `positions` (seq,), or
        (batch, seq), are the tokens' positions in their sequence, by default those after the cache; `documents` are
        those of the whole sequences, where attention must not cross them, by default those of the cache."""
        if cache is not None:
            documents = cache.documents(tokens.shape[1], tokens.device) if documents is None else documents
            positions = cache.positions(tokens.shape[1], tokens.device) if positions is None else positions
        elif positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x, beside = self.beside(self.embed_tokens(tokens, positions, noise), tokens)
        x = self.through(self.trunk(self.blocks), x, positions, noise, cache, documents, beside=beside)
        if cache is not None:
            cache.length += tokens.shape[1]
        return x

    def trunk(self, layers: Iterable[str]) -> list[str]:
        """Returns those of `layers` that are no modules for further tokens (model.mtp)."""
        return [layer for layer in layers if int(layer) < self.config.n_layers - self.config.mtp]

    def through(
        self,
        layers: Iterable[str],
        x: Tensor,
        positions: Tensor,
        noise: Noise | None = None,
        cache: KeysAndValues | None = None,
        documents: Documents | None = None,
        conversations: Conversations | None = None,
        embedded: Tensor | None = None,
        beside: LayerTokens | None = None,
    ) -> Tensor:
        """Applies the blocks of `layers` in order to `x` (batch, seq, d_model). Routers count each of `conversations`
        for itself; by default every sequence is one. `embedded` is what a module for a further token joins to `x`, and
        `beside` what layers with an embedding of their own read."""
        cache = SharedKeys(self.key_sources, cache) if self.key_sources else cache
        every = (False, True) if self.config.window_rope_theta else (False,)
        tables = {
            (config.rotary_size, windowed): self.rotary(positions, x.dtype, windowed=windowed, config=config)
            for config in attention_models(self.config)
            for windowed in every
        }
        growth = None
        if self.config.query_growth.rate:
            growth = query_growth(self.config, positions).to(torch.promote_types(x.dtype, torch.float32))
        for layer in layers:
            size, windowed = self.rotary_sizes[int(layer)], self.config.window_of(int(layer)) > 0
            turns = self.config.rotates(int(layer))
            rotary = tables[size, windowed and len(every) > 1] if turns else growth
            x = self.blocks[layer](x, rotary, noise, cache, documents, conversations, embedded, beside)
        return x

    def beside(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, LayerTokens | None]:
        """Returns hidden states (batch, seq, d_model), and what layers with an embedding of their own read beside them,
        from the first block's input or from what an earlier stage sent, (batch, seq, stream_width)."""
        if not self.config.layer_embedding:
            return x, None
        width = self.config.d_model
        if x.shape[-1] == width:  # a rank with the first stage may have later ones, too
            assert self.layer_inputs is not None, "the first stage has it"
            return x, LayerTokens(tokens, self.layer_inputs(x))
        return x[..., :width], LayerTokens(tokens, x[..., width:])

    def sent(self, x: Tensor, beside: LayerTokens | None) -> Tensor:
        """Returns what a stage sends to the next, (batch, seq, stream_width), of its output (batch, seq, d_model)."""
        return x if beside is None else torch.cat((x, beside.projected), -1)

    def normed(self, x: Tensor) -> Tensor:
        """Returns the last block's output normalised, (batch, seq, d_model) both."""
        return self.final_norm(x)

    def gathered(self, x: Tensor) -> Tensor:
        """Returns the head's input, (batch, seq, d_model), from the output of `normed`, or of a module for a further
        token. What divides the logits divides it: it is smaller than they are."""
        x = x if self.gather is None else self.gather(x)
        return x if self.config.logit_divisor == 1 else x / self.config.logit_divisor

    def embed_tokens(self, tokens: Tensor, positions: Tensor, noise: Noise | None) -> Tensor:
        """Returns the first block's input, (batch, seq, d_model)."""
        x = self.look_up(tokens)
        if self.positions is not None:
            if positions.shape[-1] > self.config.seq_len:
                raise JobError(
                    f"{positions.shape[-1]} tokens, but the model has {self.config.seq_len} learned positions: "
                    "shorten the input or train with a larger model.seq_len"
                )
            x = x + self.positions(positions, tokens.shape)
        x = dropout(perturbed(x, noise), self.config.dropout, noise, "embed")
        # Without a gradient of a frozen embedding the first block still has that of its input, like every other, so
        # that all blocks compute and send the same.
        return x.requires_grad_() if self.config.freezes and torch.is_grad_enabled() else x

    def look_up(self, tokens: Tensor) -> Tensor:
        """Returns the embeddings of `tokens` (batch, seq) without positions: (batch, seq, d_model)."""
        x = self.embed(tokens)
        if self.config.scaled_embedding or self.config.embedding_multiplier != 1:
            x = x * self.embedding_scales[x.dtype]
        return x

    def rotary(
        self, positions: Tensor, dtype: torch.dtype, *, windowed: bool = False, config: ModelConfig | None = None
    ) -> Tensor | None:
        """Returns the table that rotates queries and keys at `positions` (seq,) or (batch, seq), `windowed` in layers
        with a window, and of the heads of `config`, by default the model's; None for learned positions."""
        if self.config.positions != "rope":
            return None
        return rotary_table(config or self.config, positions, dtype, windowed=windowed)

    def logits(self, x: Tensor) -> Tensor:
        """Returns (..., vocab) from the output of `gathered`, (..., d_model)."""
        logits = self.head(x, self.embed.weight if self.config.tied else None)
        cap = self.config.logit_softcap
        return soft_cap(logits, cap) if cap else logits


class Embedding(nn.Embedding):
    """An embedding that draws no values on the meta device, where torch would import its compiler for them."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class LayerTokens(NamedTuple):
    """What layers with an embedding of their own read."""

    tokens: Tensor
    """(batch, seq)."""
    projected: Tensor
    """The output of LayerInputs, (batch, seq, layers × layer_embedding)."""


class PositionEmbedding(Embedding):
    """Learned positions: a vector (d_model,) for each of seq_len positions."""

    def forward(self, input: Tensor, shape: torch.Size) -> Tensor:  # pyrefly: ignore[bad-override]
        """Returns the position embedding of tokens of `shape` (batch, seq): (seq, d_model) at positions `input` (seq,),
        the same for every sequence, or (batch, seq, d_model) at (batch, seq)."""
        return super().forward(input)


class Block(nn.Module):
    """One layer: attention and a feed-forward layer of the kinds in phalanx.blocks.kinds, each between norms and added
    to the residual stream; one after the other or, in a parallel block, both on the same stream. A layout may replace
    `run`, which calls `compute`, and `run_halves`, which calls a parallel block's `halves`."""

    run: Run = staticmethod(run)
    run_halves: Run = staticmethod(run)

    def __init__(self, model: ModelConfig, layer: int, routing: Routing):
        super().__init__()
        self.dropout, self.multiplier = model.dropout, model.residual_multiplier
        self.parallel = model.parallel_block
        self.site = f"blocks.{layer}"
        kind = block_kinds(model)[layer]
        self.join = Join(model) if kind.predicts else None
        self.kinds = ATTENTION[kind.attention], FEED_FORWARD[kind.feed_forward]
        self.attn_norm = make_norm(model) if model.norms_inputs else nn.Identity()
        self.attn = make_sublayer(ATTENTION, kind.attention, model_for(model, kind.attention), layer)
        for core in self.attn.modules():
            if hasattr(core, "routing"):
                core.routing = routing  # pyrefly: ignore[bad-argument-type]
        self.attn_post_norm = make_norm(model) if model.norms_outputs else nn.Identity()
        apart = kind.routed and model.moe.own_norms
        plain = RMSNorm(model.d_model, model.norm_eps, elementwise_affine=False) if apart else None
        self.mlp_norm = plain or (make_norm(model) if model.norms_inputs else nn.Identity())
        self.add_module(
            self.kinds[1].name_in_block, make_sublayer(FEED_FORWARD, kind.feed_forward, model, layer, routing)
        )
        after = NormedSum if apart else make_norm
        self.mlp_post_norm = after(model) if model.norms_outputs else nn.Identity()
        self.predict_norm = make_norm(model) if kind.predicts else nn.Identity()
        self.layer_input = LayerInput(model, layer) if model.layer_embedding else None
        self.rescale = Rescale() if model.layer_scale else nn.Identity()

    def sublayers(self) -> Iterator[tuple[SublayerKind, nn.Module]]:
        """Yields attention and the feed-forward layer, each with its kind."""
        for kind in self.kinds:
            yield kind, self.get_submodule(kind.name_in_block)

    def forward(
        self,
        x: Tensor,
        rotary: Tensor | None,
        noise: Noise | None,
        cache: KeysAndValues | None,
        documents: Documents | None = None,
        conversations: Conversations | None = None,
        embedded: Tensor | None = None,
        beside: LayerTokens | None = None,
    ) -> Tensor:
        """Runs `compute`."""
        more = () if embedded is None else (embedded,)
        more = more if beside is None else (embedded, *beside)
        return self.run(self.compute, x, rotary, noise, cache, documents, conversations, *more)

    def compute(
        self,
        x: Tensor,
        rotary: Tensor | None,
        noise: Noise | None,
        cache: KeysAndValues | None,
        documents: Documents | None,
        conversations: Conversations | None,
        embedded: Tensor | None = None,
        tokens: Tensor | None = None,
        projected: Tensor | None = None,
    ) -> Tensor:
        """Applies the block, (batch, seq, d_model) to the same shape. That of a module for a further token joins
        `embedded` (batch, seq, d_model) to `x` before, and normalises its output. `tokens` and `projected` are those of
        `LayerTokens`."""
        if self.join is not None:
            x = self.join(x, embedded)
        if self.parallel:
            both = self.run_halves(self.halves, x, rotary, noise, cache, documents, conversations)
            return self.rescale(self.predict_norm(self.added(x, self.dropped(both, noise, "residual"))))
        x = self.attended(x, rotary, noise, cache, documents, conversations)
        return self.widened(x, self.feed_forward(self.mlp_norm(x), conversations), noise, tokens, projected)

    def attended(
        self,
        x: Tensor,
        rotary: Tensor | None,
        noise: Noise | None,
        cache: KeysAndValues | None,
        documents: Documents | None,
        conversations: Conversations | None,
    ) -> Tensor:
        """Adds attention to the residual stream `x` (batch, seq, d_model)."""
        attended = self.attn_post_norm(self.attention(x, rotary, noise, cache, documents, conversations))
        return self.added(x, self.dropped(attended, noise, "attn.residual"))

    def widened(
        self, x: Tensor, y: Tensor, noise: Noise | None, tokens: Tensor | None, projected: Tensor | None
    ) -> Tensor:
        """Adds the feed-forward layer's output `y` to the residual stream `x`, both (batch, seq, d_model), and what
        else stands at the end of the block."""
        widened = self.mlp_post_norm(y)
        x = self.predict_norm(self.added(x, self.dropped(widened, noise, "mlp.residual")))
        if self.layer_input is not None:
            x = x + self.dropped(self.layer_input(x, tokens, projected), noise, "layer_input.residual")
        return self.rescale(x)

    def added(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns the sum of the residual stream and the result of a half, both (batch, seq, d_model)."""
        return x + y if self.multiplier == 1 else torch.add(x, y, alpha=self.multiplier)

    def dropped(self, x: Tensor, noise: Noise | None, place: str) -> Tensor:
        """Returns `x` (batch, seq, d_model) with elements dropped before it is added at `place`."""
        return x if noise is None or self.dropout == 0 else self._drop(x, noise, place)

    @uncompiled
    def _drop(self, x: Tensor, noise: Noise, place: str) -> Tensor:
        # The site has the layer's number: read in a compiled graph, it would make one of each layer.
        return noise.dropout(x, self.dropout, f"{self.site}.{place}")

    def halves(
        self,
        x: Tensor,
        rotary: Tensor | None,
        noise: Noise | None,
        cache: KeysAndValues | None,
        documents: Documents | None,
        conversations: Conversations | None,
    ) -> Tensor:
        """Returns what a parallel block adds to the residual stream `x` (batch, seq, d_model), in the same shape: the
        sum of attention and MLP, each with a norm of its own (GPT-NeoX-20B, Black et al. 2022, section 2.1)."""
        attended = self.attention(x, rotary, noise, cache, documents, conversations)
        return attended + self.feed_forward(self.mlp_norm(x), conversations)

    def attention(
        self,
        x: Tensor,
        rotary: Tensor | None,
        noise: Noise | None,
        cache: KeysAndValues | None,
        documents: Documents | None,
        conversations: Conversations | None,
    ) -> Tensor:
        """Applies attention after its norm, (batch, seq, d_model) to the same shape."""
        inputs = self.attn_norm(x), rotary, noise, cache, documents
        return self.attn(*inputs, conversations) if self.kinds[0].counts else self.attn(*inputs)

    def feed_forward(self, x: Tensor, conversations: Conversations | None) -> Tensor:
        """Applies the feed-forward layer, (batch, seq, d_model) to the same shape."""
        kind = self.kinds[1]
        layer = getattr(self, kind.name_in_block)
        return layer(x, conversations) if kind.routed else layer(x)


class NormedSum(nn.Module):
    """The norm of the sum of the normalised outputs of routed and of shared experts (model.moe.own_norms)."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.routed, self.shared, self.both = (make_norm(model) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Maps both outputs in a row, (batch, seq, 2 × d_model), to (batch, seq, d_model)."""
        routed, shared = x.chunk(2, -1)
        return self.both(self.routed(routed) + self.shared(shared))


class Join(nn.Module):
    """Joins hidden states with the embeddings of later tokens (DeepSeek-V3, section 2.2, equation 21). The embeddings
    come first, as in the matrices that were published."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.hidden_norm, self.embed_norm = make_norm(model), make_norm(model)
        self.proj = Linear(2 * model.d_model, model.d_model, bias=False)

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
        """Maps hidden states and embeddings, (batch, seq, d_model) both, to the same shape."""
        return self.proj(torch.cat((self.embed_norm(embedded), self.hidden_norm(x)), dim=-1))


class Head(nn.Module):
    """Computes logits from the final hidden states, with its own matrix or, where tied, the embedding's."""

    multiply: Multiply = staticmethod(F.linear)

    def __init__(self, model: ModelConfig, vocab: int):
        super().__init__()
        self.weight = None if model.tied else nn.Parameter(torch.empty(vocab, model.d_model))

    def forward(self, x: Tensor, embedding: Tensor | None) -> Tensor:
        """Returns (batch, seq, vocab) from `x` (batch, seq, d_model) and, where tied, `embedding` (vocab, d_model)."""
        weight = embedding if self.weight is None else self.weight
        assert weight is not None, "a tied head needs the embedding's weight"
        return self.multiply(x, weight)
