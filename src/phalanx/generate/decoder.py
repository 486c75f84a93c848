"""Computes logits for batches of texts, with a KV cache: the whole model on one process, or this rank's part of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor

from phalanx.comm.agree import broadcast_json
from phalanx.comm.axis import Axis
from phalanx.config.model import ModelConfig
from phalanx.model.cache import Cache
from phalanx.model.transformer import Transformer
from phalanx.parallel.stages import Stage

Rows = Sequence[Sequence[int]]
"""Tokens of several texts, equally many of each."""
NO_LOGITS = torch.empty(0)
"""The result on ranks that choose no tokens."""
Method = TypeVar("Method", bound=Callable[..., Any])
_ORDERS: set[str] = set()


STOP = "stop"


def _everywhere(method: Method) -> Method:
    """Returns a decoder's method that asks the other ranks to call it, too, where the decoder leads them."""

    @wraps(method)
    def call(decoder: Decoder, *arguments: Any, **named: Any) -> Any:
        if decoder.leads:
            broadcast_json([method.__name__, arguments, named])
        return method(decoder, *arguments, **named)

    _ORDERS.add(method.__name__)
    return cast(Method, call)


def follow(part: Decoder) -> None:
    """Does what rank 0 asks for, until it stops."""
    while (asked := broadcast_json(None)) != STOP:
        order, arguments, named = asked
        assert order in _ORDERS, "rank 0 asks for nothing else"
        getattr(part, order)(*arguments, **named)


@dataclass
class Decoder:
    """Computes logits for batches of texts, which it holds by name, over a model in this process: the whole of it, or
    one rank's part. Ranks call the same methods with the same arguments; the first rank gets the logits, on the CPU or
    a device, in the model's type."""

    model: Transformer
    device: torch.device
    vocab: int
    """Tokens of the vocabulary."""
    stages: Mapping[int, Stage]
    """This rank's, by number."""
    placement: Sequence[int] = (0,)
    """The rank of every stage."""
    pp: Axis = field(default_factory=lambda: Axis("pp"))
    """The ranks that hold the layers."""
    tp: Axis = field(default_factory=lambda: Axis("tp"))
    """The ranks that hold parts of this stage's matrices."""
    batches: dict[str, Cache] = field(default_factory=dict)
    leads: bool = False
    """Whether other ranks wait for each call (see `follow`)."""
    alike: bool = False
    """Whether all ranks make the same calls by themselves, and get the same logits, to the bit."""

    @classmethod
    def whole(cls, model: Transformer) -> Self:
        """Returns the decoder of a model that this process holds entirely."""
        weight = model.embed.weight
        return cls(model, weight.device, model.embed.num_embeddings, {0: Stage(tuple(model.blocks), True, True)})

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self.model.config

    @_everywhere
    def prefill(self, batch: str, prompt: Sequence[int], copies: int, last: bool) -> Tensor:
        """Appends `copies` texts with the same tokens to a batch; returns the logits (vocab,) after them. Unless
        `last`, the last token is left out of the cache, and the result means nothing. A prompt is computed alone, so
        that a mixture with a capacity drops what it drops alone."""
        cache = Cache(self.config.seq_len)
        logits = self._forward([prompt], cache, 1)
        if not last:
            cache.rewind([1])
        self._batch(batch).append(cache, copies)
        return logits[0, 0] if len(logits) else logits

    @_everywhere
    def step(self, batch: str, tokens: Rows) -> Tensor:
        """Appends tokens to every text of a batch; returns the logits (texts, tokens, vocab) after each token."""
        return self._forward(tokens, self._batch(batch), len(tokens[0]))

    @_everywhere
    def rewind(self, batch: str, dropped: Sequence[int]) -> None:
        """Forgets the last tokens of each text, `dropped` of them."""
        self._batch(batch).rewind(dropped)

    @_everywhere
    def keep(self, batch: str, rows: Sequence[int]) -> None:
        """Keeps the texts `rows` of a batch in this order."""
        self._batch(batch).keep(rows)

    @_everywhere
    def move(self, batch: str, row: int, target: str) -> None:
        """Appends a copy of one text of a batch to another batch."""
        self._batch(target).append(self._batch(batch).take(row))

    @_everywhere
    def window(self, tokens: Rows) -> Tensor:
        """Returns the logits (texts, vocab) after whole texts of one length, without a cache."""
        logits = self._forward(tokens, None, 1)
        return logits[:, 0] if len(logits) else logits

    def _batch(self, name: str) -> Cache:
        return self.batches.setdefault(name, Cache(self.config.seq_len))

    @torch.inference_mode()
    def _forward(self, rows: Rows, cache: Cache | None, last: int) -> Tensor:
        """Returns logits (texts, last, vocab) after the last tokens, on the first rank."""
        model, device = self.model, self.device
        tokens = torch.tensor(rows, dtype=torch.int64, device=device)
        texts, seq = tokens.shape
        positions = torch.arange(seq, device=device) if cache is None else cache.positions(seq, device)
        documents = None if cache is None else cache.documents(seq, device)
        x = NO_LOGITS
        for number, rank in enumerate(self.placement):
            if rank != self.pp.rank:
                continue
            stage = self.stages[number]
            if stage.first:
                x = model.embed_tokens(tokens, positions, None)
            elif (before := self.placement[number - 1]) != rank:
                x = torch.empty(texts, seq, self.config.stream_width, dtype=self._dtype, device=device)
                self.pp.receive(x, before)
            x, beside = model.beside(x, tokens)
            x = model.through(stage.layers, x, positions, None, cache, documents, beside=beside)
            x = x if stage.last else model.sent(x, beside)
            if not stage.last and (after := self.placement[number + 1]) != rank:
                self.pp.send(x.contiguous(), after)
        if cache is not None:
            cache.length += seq
        if self.placement[-1] != self.pp.rank:
            return self._from_last(texts, last)
        logits = self._logits(x[:, -last:])
        return self._to_all(logits) if self.alike else self._to_first(logits)

    def _logits(self, x: Tensor) -> Tensor:
        """Returns logits over the whole vocabulary from the last block's output (texts, tokens, d_model)."""
        part = self.model.logits(self.model.gathered(self.model.normed(x)))
        if self.tp.size == 1:
            return part
        parts = part.new_empty(self.tp.size, *part.shape)
        self.tp.all_gather(parts.view(-1), part.contiguous().view(-1)).wait()
        return parts.permute(1, 2, 0, 3).flatten(2)[..., : self.vocab]  # beyond it is padding

    def _to_all(self, logits: Tensor) -> Tensor:
        """Gives the last stage's logits to every rank."""
        logits = logits.contiguous()
        self.pp.broadcast(logits, self.placement[-1]).wait()
        return logits

    def _to_first(self, logits: Tensor) -> Tensor:
        """Sends the last stage's logits to the first rank, which chooses."""
        if self.tp.rank:
            return NO_LOGITS
        if self.pp.size > 1:
            self.pp.send(logits.contiguous(), 0)
            return NO_LOGITS
        return logits

    def _from_last(self, texts: int, last: int) -> Tensor:
        """Receives the last stage's logits on the first rank, or on all."""
        if not self.alike and (self.pp.rank != self.placement[0] or self.tp.rank):
            return NO_LOGITS
        logits = torch.empty(texts, last, self.vocab, dtype=self._dtype, device=self.device)
        if self.alike:
            return self._to_all(logits)
        self.pp.receive(logits, self.placement[-1])
        return logits

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype
