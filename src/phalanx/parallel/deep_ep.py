"""Dispatch by DeepEP's kernels (deepseek-ai/DeepEP, the normal ones of `Buffer`), which send a token once to each node
and pass it on there: the ways to send and to return of a TokenExchange, over one buffer per process group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from phalanx.blocks.operator import EXPERT_NUMBER
from phalanx.comm.axis import Axis
from phalanx.model.layers import uncompiled
from phalanx.model.moe import RoutedTokens
from phalanx.parallel.expert import TokenExchange, arrived


@dataclass(frozen=True)
class DeepExchange(TokenExchange):
    """TokenExchange by DeepEP. The axes of neighbours are not used: DeepEP finds the nodes by itself."""

    near: Axis | None = None
    far: Axis | None = None
    buffers: dict[int, Any] = field(default_factory=dict, compare=False)
    """The buffer, by the bytes of a token."""

    @uncompiled
    def send(self, tokens: Tensor, chosen: Tensor, gates: Tensor, n: int) -> DeepTokens:
        """Starts to send, as TokenExchange.send."""
        sent = DeepTokens(self.ep, self._buffer(tokens), chosen.where(chosen < n, -1), n)
        sent.arriving = _DeepDispatch.apply(tokens, gates.to(torch.promote_types(gates.dtype, torch.float32)), sent)
        return sent

    @uncompiled
    def arrive(self, sent: DeepTokens) -> RoutedTokens:
        """Returns the tokens that have arrived, as TokenExchange.arrive."""
        sent.event.current_stream_wait()
        (tokens, gates), sent.arriving = sent.arriving, ()
        return arrived(tokens, sent.chosen, gates.to(tokens.dtype), sent.experts // self.ep.size, sum(sent.per_expert))

    @uncompiled
    def send_back(self, outputs: Tensor, sent: DeepTokens) -> None:
        """Starts to return the outputs of the tokens that arrived."""
        sent.arriving = (_DeepCombine.apply(outputs, sent),)

    @uncompiled
    def arrive_back(self, sent: DeepTokens) -> Tensor:
        """Returns the sums of each token's outputs."""
        sent.event.current_stream_wait()
        return sent.arriving[0]

    def _buffer(self, tokens: Tensor) -> Any:
        from deep_ep import Buffer  # pyrefly: ignore[missing-import] -- an optional library

        width, ranks = tokens.shape[1] * max(2, tokens.element_size()), self.ep.size
        if width not in self.buffers:
            near, far = 0, 0
            for config in (Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks)):
                near = max(near, config.get_nvl_buffer_size_hint(width, ranks))
                far = max(far, config.get_rdma_buffer_size_hint(width, ranks))
            self.buffers[width] = Buffer(self.ep.group, near, far)
        return self.buffers[width]


@dataclass(eq=False)
class DeepTokens:
    """Tokens that DeepExchange has sent."""

    ep: Axis
    buffer: Any
    chosen: Tensor
    """Each token's experts, -1 for none; of the tokens that arrive by their numbers here."""
    experts: int
    arriving: tuple[Tensor, ...] = ()
    handle: Any = None
    event: Any = None
    per_expert: list[int] = field(default_factory=list)
    """Rows of each expert here."""
    away: list[int] = field(default_factory=list)
    """Tokens sent to other ranks, and got from them."""

    def dispatch(self, tokens: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        """Sends tokens with their gates to their experts. Returns those that arrive, once `event` has been."""
        n = self.experts
        to, to_nodes, of_experts, is_sent, ready = self.buffer.get_dispatch_layout(self.chosen, n, async_finish=True)
        there, numbers, weights, self.per_expert, self.handle, self.event = self.buffer.dispatch(
            tokens,
            topk_idx=self.chosen,
            topk_weights=gates,
            num_tokens_per_rank=to,
            num_tokens_per_rdma_rank=to_nodes,
            is_token_in_rank=is_sent,
            num_tokens_per_expert=of_experts,
            previous_event=ready,
            async_finish=True,
        )
        # The host has waited for the numbers that arrive, and so for these.
        counts, rank = to.tolist(), self.ep.rank
        own = counts[rank]
        self.away = [sum(counts) - own, len(there) - own]
        self._note(self.away[0], tokens, gates=True, numbers=True)
        self.chosen = numbers
        return there, weights

    def combine(self, outputs: Tensor, gates: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns outputs, or gradients of tokens with those of their gates, to where the tokens came from: sums."""
        self._note(self.away[1], outputs, gates=gates is not None)
        found, weights, self.event = self.buffer.combine(
            outputs.contiguous(), self.handle, topk_weights=gates, async_finish=True
        )
        return found, weights

    def again(self, gradients: Tensor) -> Tensor:
        """Sends gradients of outputs the way of the tokens."""
        self._note(self.away[0], gradients)
        found, *_, self.event = self.buffer.dispatch(gradients.contiguous(), handle=self.handle, async_finish=True)
        return found

    def _note(self, tokens: int, x: Tensor, *, gates: bool = False, numbers: bool = False) -> None:
        """Counts what TokenExchange would send: the kernels' headers, and gates' wider numbers, are left out."""
        row = (x.shape[1] + gates * self.chosen.shape[1]) * x.element_size()
        row += numbers * self.chosen.shape[1] * EXPERT_NUMBER
        self.ep.ledger.note(self.ep.name, "all_to_all", tokens * row)


class _DeepDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, gates: Tensor, sent: DeepTokens) -> tuple[Tensor, Tensor]:
        ctx.sent = sent
        return sent.dispatch(tokens, gates)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, Tensor | None, None]:
        of_tokens, of_gates = ctx.sent.combine(*grad_outputs)
        ctx.sent.event.current_stream_wait()
        return of_tokens, of_gates, None


class _DeepCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, sent: DeepTokens) -> Tensor:
        ctx.sent = sent
        return sent.combine(outputs)[0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        found = ctx.sent.again(grad_outputs[0])
        ctx.sent.event.current_stream_wait()
        return found, None
