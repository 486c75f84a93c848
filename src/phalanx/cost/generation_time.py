"""Seconds of completions to train on (GRPO, generate/rollouts.py).

Each prompt is computed alone, and all of its completions begin with it; then every text of a batch grows by a token per
pass. A pass reads all weights, and the keys and values of all tokens so far: with few texts it is bound by the memory's
bandwidth. Stages of a pipeline take turns. Lengths are the largest (cost/generation.py): with shorter ones all of it
takes less.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from phalanx.blocks.attention import cache_columns
from phalanx.blocks.kinds import half_block
from phalanx.cost.communication import boundary_seconds, place
from phalanx.cost.generation import generating, generation_bytes, lengths, position_bytes, texts_of
from phalanx.cost.held import Content, contents
from phalanx.cost.kernels import operator_seconds, stream_seconds
from phalanx.cost.rank_time import around_time, rank_time
from phalanx.cost.spec import StepSpec

CHOICE_KERNELS, CPU_CHOICE, CHOICE_PASSES = 12, 1.5, 10
"""Operations that the host launches to choose a token (log-probabilities in fp64, the draw, copies to the host); what
they take on a CPU, in times of launching an operation of training (measured); and their passes over the logits."""
MERGE_KERNELS = 4
"""Operations that copy the texts of a prompt in a layer's cache when another prompt's join them."""


@dataclass(frozen=True)
class RolloutTime:
    """A batch of completions, by its slowest ranks."""

    prompts: int
    """Prompts on all ranks together."""
    prompt_tokens: int
    new_tokens: int
    texts: int
    """Texts that grow at once, on each group of ranks that generate together."""
    updates: int
    """Steps that train on the batch."""
    prompts_s: float
    """Seconds until all texts have their first tokens."""
    decoding_s: float
    scoring_s: float
    """Seconds of the forward passes that score the batch."""
    cache: int
    """Bytes of keys and values on the fullest rank."""

    def as_dict(self) -> dict[str, float]:
        """Returns its part of the document of `--json`."""
        return {**vars(self), "tokens_per_s": self.tokens_per_s}

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second of a group of ranks that generate together, while its texts grow."""
        return self.texts * max(1, self.new_tokens - 1) / self.decoding_s if self.decoding_s else 0.0


def _in_turn(spec: StepSpec, ranks: Iterable[Content], *, head: bool = True) -> float:
    """Returns the seconds of a forward pass through all stages, one after the other."""
    parts = (rank_time(spec, content if head else replace(content, head=False)).forward_seconds for content in ranks)
    last = spec.layout.pp - 1
    return sum(parts) + sum(boundary_seconds(spec, rank, rank + 1) for rank in range(last))


@lru_cache(1000)
def generation(spec: StepSpec) -> RolloutTime | None:
    """Returns the seconds and the cache of a step's completions; None without any."""
    if not (options := spec.rollout):
        return None
    device, ranks = spec.cluster.accelerator, contents(spec)
    prompts, texts = texts_of(spec, options)
    prompt, new = lengths(spec, options)
    kinds = [(kind, many) for content in ranks for kind, many in content.of_kind.items()]
    one = generating(spec, 1, 1)
    positions = sum(position_bytes(one, kind) * many for kind, many in kinds)
    layers = sum(many for _, many in kinds)
    launching = (device.host_us or spec.framework.kernel_us) * 1e-6

    def choices(count: int) -> float:
        """Seconds in which the tokens of `count` texts are chosen."""
        logits = 8.0 * count * spec.model.vocab_size * CHOICE_PASSES
        return max(
            stream_seconds(device, logits, count),
            count * (CPU_CHOICE if device.host_us else CHOICE_KERNELS) * launching,
        )

    def growing(count: int) -> float:
        """Seconds in which `count` texts get the rest of their tokens."""
        seen = count * (prompt + new / 2)
        once = _in_turn(generating(spec, count, 1), ranks) + stream_seconds(device, seen * positions) + choices(count)
        again = generating(spec, count, prompt + new // 2)
        for kind, many in kinds:  # recurrent layers compute the states of all tokens again
            work = half_block(place(again), kind, "attention")
            scans = [operator for operator in work if kind.attention == "delta" and operator.fused]
            once += many * operator_seconds(device, scans, spec.framework, spec.products, spec.layout.tp).forward
        return (new - 1) * once

    begun = (
        _in_turn(generating(spec, 1, prompt), ranks, head=False) + around_time(one, Content((), False, True)).forward
    )
    each = max(1, texts // options.group)  # prompts whose texts grow together: all move when another's join them
    cached = texts * cache_columns(prompt, spec.model.seq_len) * positions
    moved = stream_seconds(device, cached) + each * layers * MERGE_KERNELS * launching
    waves = [texts] * (prompts * options.group // texts) + [prompts * options.group % texts]
    micro = _in_turn(spec, ranks) * spec.batch.accumulation
    return RolloutTime(
        prompts=spec.batch.global_batch // options.group,
        prompt_tokens=prompt,
        new_tokens=new,
        texts=texts,
        updates=options.updates,
        prompts_s=prompts * (begun + moved + choices(options.group)),
        decoding_s=sum(growing(count) for count in waves if count),
        scoring_s=(1 + (options.beta > 0)) * micro,
        cache=round(
            max(generation_bytes(spec, rank.of_kind.items(), (rank.embedding, rank.head)).cache for rank in ranks)
        ),
    )
