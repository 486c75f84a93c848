"""Dispatch by DeepEP, with a stand-in for its library that has the same calls and sends by gloo."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel import test_expert
from parallel.test_expert import axis_of, compare_with_one_process, part_of, run, tokens_of_all, whole_layer
from phalanx.errors import JobError
from phalanx.parallel import expert
from phalanx.parallel.deep_ep import DeepExchange
from phalanx.parallel.expert import TokenExchange


class Buffer:
    """The calls of deep_ep.Buffer that DeepExchange makes."""

    def __init__(self, group: dist.ProcessGroup, near: int, far: int):
        self.group, self.rank, self.size = group, group.rank(), group.size()
        assert (near, far) == (2, 1)

    @staticmethod
    def get_dispatch_config(ranks: int) -> Any:
        return SimpleNamespace(get_nvl_buffer_size_hint=lambda *_: 1, get_rdma_buffer_size_hint=lambda *_: 1)

    @staticmethod
    def get_combine_config(ranks: int) -> Any:
        return SimpleNamespace(get_nvl_buffer_size_hint=lambda *_: 2, get_rdma_buffer_size_hint=lambda *_: 0)

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int, *, async_finish: bool) -> tuple[Any, ...]:
        self.per = num_experts // self.size
        ranks = topk_idx.div(self.per, rounding_mode="floor")
        is_sent = torch.stack([(ranks == rank).any(1) for rank in range(self.size)], 1)
        experts = torch.stack([(topk_idx == number).sum() for number in range(num_experts)])
        return is_sent.sum(0), None, experts, is_sent, "ready"

    def _everyones(self, mine: Any) -> list[Any]:
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, mine, self.group)
        return every

    def dispatch(
        self, x: Tensor, handle: Any = None, topk_idx: Any = None, topk_weights: Any = None, **more: Any
    ) -> Any:
        assert more.pop("async_finish")
        event = SimpleNamespace(current_stream_wait=lambda: None)
        if handle is not None:
            every = self._everyones(x)
            found = torch.cat([of[taken] for of, taken in zip(every, handle[0], strict=True)])
            return found, None, None, None, None, event
        assert more.pop("previous_event") == "ready"
        assert set(more) == {
            *("num_tokens_per_rank", "num_tokens_per_rdma_rank", "is_token_in_rank", "num_tokens_per_expert")
        }
        every = self._everyones((x.detach(), topk_idx, topk_weights.detach(), more["is_token_in_rank"]))
        here = [is_sent[:, self.rank] for *_, is_sent in every]
        tokens, chosen, weights = (
            torch.cat([of[part][taken] for of, taken in zip(every, here, strict=True)]) for part in range(3)
        )
        chosen = chosen - self.rank * self.per
        chosen = chosen.where((chosen >= 0) & (chosen < self.per), -1)
        counts = [int((chosen == number).sum()) for number in range(self.per)]
        handle = here, [is_sent for *_, is_sent in every]
        return tokens, chosen, weights, counts, handle, event

    def combine(self, x: Tensor, handle: Any, topk_weights: Any = None, *, async_finish: bool) -> Any:
        here, sent = handle

        def back(values: Tensor) -> Tensor:
            out = values.new_zeros(len(sent[self.rank]), values.shape[1])
            for rank, of in enumerate(self._everyones((values.detach(), [int(taken.sum()) for taken in here]))):
                out[sent[self.rank][:, rank]] += of[0].split(of[1])[self.rank]
            return out

        weights = None if topk_weights is None else back(topk_weights)
        return back(x), weights, SimpleNamespace(current_stream_wait=lambda: None)


def with_stand_in() -> Any:
    module = ModuleType("deep_ep")
    module.Buffer = Buffer
    return mock.patch.dict(sys.modules, {"deep_ep": module})


def compare(ranks: Any) -> None:
    with with_stand_in():
        compare_with_one_process(ranks, DeepExchange)


def sent_by_both(ranks: Any) -> list[float]:
    """Bytes in the ledger for the same layer, by DeepEP and by all-to-alls."""
    found = []
    for exchange in (DeepExchange, TokenExchange):
        ep = axis_of(ranks)
        x, weights = tokens_of_all(ranks.world)
        mine = slice(ranks.rank * test_expert.BATCH, (ranks.rank + 1) * test_expert.BATCH)
        with with_stand_in():
            run(part_of(whole_layer(test_expert.SHARED, one_sided=False), ep, exchange), x[mine], weights[mine])
        found.append(ep.ledger.entries["ep", "all_to_all"].sent)
    return found


def test_experts_reached_by_deep_ep_equal_one_process(ranks):
    ranks(compare, 2)


def test_deep_ep_counts_the_bytes_that_all_to_alls_of_tokens_send(ranks):
    for by_deep_ep, by_all_to_alls in ranks(sent_by_both, 2):
        assert by_deep_ep == by_all_to_alls > 0


def test_a_dispatcher_that_does_not_run_here_is_refused_with_the_reason():
    with pytest.raises(JobError, match=r"deepep runs on CUDA devices, this rank's device is cpu; nearest legal: disp"):
        expert.dispatcher("deepep", torch.device("cpu"))
    with pytest.raises(JobError, match=r"deepep needs deep_ep, not installed here \(from github"):
        expert.dispatcher("deepep", torch.device("cuda"))
