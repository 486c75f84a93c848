"""The model with its loss: tokens and targets in, the sum of the loss over valid tokens out.

Slices of sequences pass through a pipeline one after the other (TeraPipe: Li et al. 2021, section 3.2): a slice needs
the keys and values of earlier ones, layer by layer, and the backward pass, in reverse order, adds the gradients that
later slices contribute to them. The loss of preferences (DPO: Rafailov et al. 2023, equation 7) depends on whole
sequences: context-parallel ranks sum one number per sequence, and each then takes the gradient of its own tokens. That
of sampled completions (GRPO: Shao et al. 2024, equation 3) is a sum over tokens, each with its sequence's advantage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.comm.axis import Axis
from phalanx.config.job import IGNORE, DpoOptions, GrpoOptions
from phalanx.model.documents import Conversations, Documents
from phalanx.model.seeding import Noise
from phalanx.model.transformer import Transformer
from phalanx.parallel.stages import Stage
from phalanx.parallel.vocabulary import ChunkedLoss, CrossEntropy, ScoreLoss, TiledHead, recomputed_loss


class FurtherTokens(NamedTuple):
    """The inputs of a module for a further token: those of depth k predict the token after the next k."""

    tokens: Tensor
    """(micro_batch, seq), int64: the token k places after each position; 0 where there is none."""
    targets: Tensor
    """(micro_batch, seq), int64: the target k places after each position; IGNORE where there is none."""

    @classmethod
    def of(cls, tokens: Tensor, targets: Tensor, documents: Documents | None, depth: int) -> FurtherTokens:
        """Returns those of depth `depth` of whole sequences (micro_batch, seq): documents are not crossed."""
        depth = min(depth, tokens.shape[1])
        further = cls(F.pad(tokens[:, depth:], (0, depth)), F.pad(targets[:, depth:], (0, depth), value=IGNORE))
        if documents is None:
            return further
        later = F.pad(documents.numbers[:, depth:], (0, depth), value=-1)
        same = later == documents.numbers
        return cls(further.tokens.where(same, 0), further.targets.where(same, IGNORE))

    def map(self, change: Callable[[Tensor], Tensor]) -> FurtherTokens:
        """Returns them with both tensors changed."""
        return FurtherTokens(change(self.tokens), change(self.targets))


@dataclass(frozen=True)
class MicroTensors:
    """The inputs of one forward pass of one rank."""

    tokens: Tensor
    """(micro_batch, seq), int64: seq_len tokens, or a context-parallel rank's part of them."""
    targets: Tensor
    """(micro_batch, seq), int64, IGNORE where a position does not count."""
    noise: Noise | None = None
    """The source of dropout masks and of noise on embeddings; None without both."""
    places: Tensor | None = None
    """Positions, within their sequences, of the tokens here, (seq,); None if all are here."""
    documents: Documents | None = None
    """Those of the whole sequences, if attention must not cross them."""
    reference: Tensor | None = None
    """(micro_batch,), float64: of preference pairs, the log-probability of each whole sequence's answer by the
    reference model; NaN for padding."""
    policy: Tensor | None = None
    """(micro_batch, seq, 4), float64, of sampled completions: data/loader.py's MicroBatch.policy."""
    conversations: Conversations | None = None
    """What routers count; None if every sequence is one conversation without padding."""
    further: tuple[FurtherTokens, ...] = ()
    """The inputs and targets of each module for further tokens."""

    @property
    def positions(self) -> Tensor:
        """The tokens' positions within their sequences, (seq,)."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) if self.places is None else self.places

    def part(self, chosen: slice) -> MicroTensors:
        """Returns some of its samples."""
        noise = self.noise and replace(self.noise, sample_ids=self.noise.sample_ids[chosen])
        documents = None if self.documents is None else self.documents.part(chosen)
        reference = None if self.reference is None else self.reference[chosen]
        policy = None if self.policy is None else self.policy[chosen]
        conversations = None if self.conversations is None else self.conversations.part(chosen)
        return replace(
            self,
            tokens=self.tokens[chosen],
            targets=self.targets[chosen],
            noise=noise,
            documents=documents,
            reference=reference,
            policy=policy,
            conversations=conversations,
            further=tuple(each.map(lambda x: x[chosen]) for each in self.further),
        )

    def sliced(self, number: int, slices: int) -> MicroTensors:
        """Returns one of several equal parts of its sequences."""
        if slices == 1:
            return self
        tokens = self.tokens.shape[1] // slices
        chosen = slice(number * tokens, (number + 1) * tokens)
        places = self.positions[chosen]
        noise = self.noise and replace(self.noise, places=places, seq_len=self.noise.seq_len or self.tokens.shape[1])
        conversations = None if self.conversations is None else self.conversations.at(chosen)
        return replace(
            self,
            tokens=self.tokens[:, chosen],
            targets=self.targets[:, chosen],
            noise=noise,
            places=places,
            policy=None if self.policy is None else self.policy[:, chosen],
            conversations=conversations,
            further=tuple(each.map(lambda x: x[:, chosen]) for each in self.further),
        )


class Earlier:
    """Keys and values of one micro-batch at one stage, of all slices processed so far."""

    def __init__(self) -> None:
        self.now = 0
        """The slice being computed or recomputed."""
        self.made: list[dict[int, tuple[Tensor, Tensor]]] = []
        """Keys and values as computed, by slice and layer."""
        self.seen: list[dict[int, tuple[Tensor, Tensor]]] = []
        """Keys and values as later slices see them, by slice and layer: leaves, which accumulate their gradients."""

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values (batch, kv_heads, tokens, head_size) of all slices up to this one."""
        if layer not in self.made[self.now]:  # otherwise this is recomputation
            self.made[self.now][layer] = keys, values
        before = [seen[layer] for seen in self.seen[: self.now]]
        if not before:
            return keys, values
        every_key, every_value = zip(*before, (keys, values), strict=True)
        return torch.cat(every_key, dim=2), torch.cat(every_value, dim=2)

    def begin(self, number: int) -> None:
        """Begins computing slice `number`."""
        self.now = number
        self.made.append({})

    def end(self) -> None:
        """Ends computing the current slice: later ones see its keys and values from now on."""
        self.seen.append({layer: (_leaf(k), _leaf(v)) for layer, (k, v) in self.made[self.now].items()})

    def again(self, number: int) -> tuple[list[Tensor], list[Tensor]]:
        """Begins a slice's backward pass. Returns the keys and values that later slices have seen, and the gradients
        that these contributed."""
        self.now = number
        del self.made[number + 1 :]
        made, seen = self.made[number], self.seen.pop()
        roots, gradients = [], []
        for layer, pair in made.items():
            for tensor, leaf in zip(pair, seen[layer], strict=True):
                if leaf.grad is not None:
                    roots.append(tensor)
                    gradients.append(leaf.grad)
        return roots, gradients


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


@dataclass(frozen=True)
class PairFacts:
    """Means over pairs, with the names they have in metrics.jsonl. A reward is beta × log(p / p of the reference)."""

    reward_chosen: float
    reward_rejected: float
    reward_margin: float
    """The chosen reward minus the rejected one."""
    reward_accuracy: float
    """The share of pairs whose chosen reward is the larger one."""

    @classmethod
    def of(cls, sums: Tensor) -> PairFacts | None:
        """Returns the means of `sums` (4,), as PairLoss.take returns them, over all ranks; None without a pair."""
        pairs, chosen, rejected, right = sums.tolist()
        if not pairs:
            return None
        return cls(chosen / pairs, rejected / pairs, (chosen - rejected) / pairs, right / pairs)


class PairLoss:
    """The loss of pairs. Rows 2i and 2i + 1 of a micro-batch are the chosen and the rejected sequence of a pair. Of a
    reward model (Bradley and Terry 1952; Ouyang et al. 2022, equation 1) it is DPO's with a beta of 1, the scores in
    place of the log-probabilities, and a reference of 0."""

    def __init__(self, options: DpoOptions, cp: Axis):
        self.options, self.cp = options, cp
        self.log_probabilities: Tensor | None = None
        """The log-probability of each sequence of the last micro-batch: (micro_batch,) fp64."""
        self._sums: Tensor | None = None

    def __call__(self, losses: Tensor, micro: MicroTensors) -> Tensor:
        """Returns the loss summed over the pairs of a micro-batch, of which every context-parallel rank gets an equal
        share, with the gradient of its own tokens. `losses` (micro_batch,) fp64 are -log p, summed over the tokens
        here."""
        assert micro.reference is not None, "the data of a job with pairs have references"
        whole = losses.detach().clone()
        self.cp.all_reduce(whole).wait()
        self.log_probabilities = -whole
        rewards = self.options.beta * (-(losses + (whole - losses.detach())) - micro.reference)
        chosen, rejected = rewards[0::2], rewards[1::2]
        real = ~micro.reference[0::2].isnan()
        margin = (chosen - rejected).where(real, 0)
        wrong = self.options.label_smoothing
        loss = -((1 - wrong) * F.logsigmoid(margin) + wrong * F.logsigmoid(-margin))
        self._count(chosen.detach(), rejected.detach(), real)
        total = loss.where(real, 0).sum()
        return total - total.detach() * (1 - 1 / self.cp.size)

    def counted(self, micro: MicroTensors) -> Tensor:
        """Returns this rank's share of the number of pairs in a micro-batch, which is not padding, in fp64."""
        assert micro.reference is not None, "the data of a job with pairs have references"
        return (~micro.reference[0::2].isnan()).double().sum() / self.cp.size

    def take(self, like: Tensor) -> Tensor:
        """Returns this rank's share of the sums over all pairs since the last call: pairs, chosen rewards, rejected
        rewards, and pairs in the right order, (4,) fp64 on the device of `like`."""
        sums, self._sums = self._sums, None
        return torch.zeros(4, dtype=torch.float64, device=like.device) if sums is None else sums / self.cp.size

    def _count(self, chosen: Tensor, rejected: Tensor, real: Tensor) -> None:
        rows = torch.stack((real, chosen, rejected, chosen > rejected)).double()
        sums = rows.where(real, 0).sum(dim=1)
        self._sums = sums if self._sums is None else self._sums + sums

    facts = staticmethod(PairFacts.of)
    """Returns the facts that follow from the sums of `take`, added over all ranks."""


@dataclass(frozen=True)
class PolicyFacts:
    """Means over the tokens of completions, with the names they have in metrics.jsonl."""

    kl: float
    """The estimated KL divergence from the reference model, in nats per token; 0 without one."""
    clip_fraction: float
    """The share of the tokens whose ratio the loss clips, so that they have no gradient but that of the KL."""
    entropy: float
    """The mean of -log p: an unbiased estimate of the policy's entropy in the first update of a batch."""

    @classmethod
    def of(cls, sums: Tensor) -> PolicyFacts | None:
        """Returns the means of `sums` (4,), as PolicyLoss.take returns them, over all ranks; None without a token."""
        tokens, *values = sums.tolist()
        return cls(*(value / tokens for value in values)) if tokens else None


class PolicyLoss:
    """The loss of sampled completions, of which each token has the log-probabilities of the policy that generated it
    and of the reference model, its sequence's advantage, and its weight in the mean over sequences."""

    def __init__(self, options: GrpoOptions, cp: Axis):
        self.options, self.cp = options, cp
        self.log_probabilities: Tensor | None = None
        """The log-probability of each target here of the last micro-batch: (micro_batch, seq) fp64."""
        self._sums: Tensor | None = None

    def __call__(self, losses: Tensor, micro: MicroTensors) -> Tensor:
        """Returns the weighted loss, summed over the tokens here. `losses` (micro_batch, seq) fp64 are -log p.

        The ratio is clipped as in PPO (Schulman et al. 2017, equation 7), and the KL divergence estimated by
        q / p - log(q / p) - 1 (Schulman 2020, "k3"; Shao et al. 2024, equation 4). Without `micro.policy`, of whoever
        asks only for the log-probabilities, it is the sum of `losses`."""
        now = -losses
        self.log_probabilities = now.detach()
        if micro.policy is None:
            return losses.sum()
        options, valid = self.options, micro.targets != IGNORE
        old, reference, advantage, weight = micro.policy.unbind(-1)
        ratio = (now - old).where(valid, 0).exp()
        clipped = ratio.clamp(1 - options.clip, 1 + (options.clip_high or options.clip))
        free, bounded = ratio * advantage, clipped * advantage
        loss, kl = -torch.minimum(free, bounded), torch.zeros_like(now)
        if options.beta:
            away = (reference - now).where(valid, 0)
            kl = torch.expm1(away) - away
            loss = loss + options.beta * kl
        rows = torch.stack((torch.ones_like(now), kl.detach(), bounded < free, losses.detach())).double()
        sums = rows.where(valid, 0).sum(dim=(1, 2))
        self._sums = sums if self._sums is None else self._sums + sums
        return (weight * loss).where(valid, 0).sum()

    def counted(self, micro: MicroTensors) -> Tensor:
        """Returns this rank's share of the number of sequences in a micro-batch, in fp64."""
        return torch.tensor(len(micro.tokens) / self.cp.size, dtype=torch.float64, device=micro.tokens.device)

    def take(self, like: Tensor) -> Tensor:
        """Returns the sums over the tokens here since the last call: tokens, KL divergences, clipped ones, and -log p,
        (4,) fp64 on the device of `like`."""
        sums, self._sums = self._sums, None
        return torch.zeros(4, dtype=torch.float64, device=like.device) if sums is None else sums

    facts = staticmethod(PolicyFacts.of)
    """Returns the facts that follow from the sums of `take`, added over all ranks."""


class Objective(nn.Module):
    """The module that data parallelism wraps: logits stay inside, one scalar comes out."""

    def __init__(
        self,
        model: Transformer,
        loss: CrossEntropy | ScoreLoss,
        compared: PairLoss | PolicyLoss | None = None,
        chunk: int = 0,
        mtp_weight: float = 0.0,
    ):
        """`compared` makes another loss of those of tokens. With `chunk`, that many tokens have logits at a time.
        `mtp_weight` is the factor of the mean loss of the modules for further tokens."""
        super().__init__()
        self.model, self.loss, self.compared, self.mtp_weight = model, loss, compared, mtp_weight
        # Losses that wait together for their backward pass have the same factor.
        pair = (ChunkedLoss(loss, chunk) if isinstance(loss, CrossEntropy) and chunk else None for _ in range(2))
        self.chunked, self.chunked_further = pair
        self._further: list[Tensor] = []
        """The losses of the modules for further tokens since they were taken, each the mean over depths."""

    def forward(
        self, micro: MicroTensors, stage: Stage | None = None, x: Tensor | None = None, earlier: Earlier | None = None
    ) -> Tensor:
        """Returns the loss summed over valid targets, in nats; or over preference pairs, or completions. Its gradient
        includes that of the modules for further tokens.

        In a pipeline only `stage` is computed: from `x`, the previous stage's output, to the next one's input,
        (micro_batch, seq, stream_width) both, or to the loss. `earlier` are the slices before these: then the
        loss of pairs, which needs whole sequences, is left to the caller: what it sums over slices is returned."""
        model = self.model
        positions = micro.positions
        if x is None:
            x = model.embed_tokens(micro.tokens, positions, micro.noise)
        x, beside = model.beside(x, micro.tokens)
        layers = [*(model.blocks if stage is None else stage.layers)]
        trunk = model.trunk(layers)
        inputs = positions, micro.noise, earlier, micro.documents, micro.conversations
        x = model.through(trunk, x, *inputs, beside=beside)
        if stage is not None and not stage.last:
            return model.sent(x, beside)
        x, shared = model.normed(x), stage is not None
        hidden = model.gathered(x).flatten(0, 1)
        if isinstance(self.compared, PolicyLoss) and self.compared.options.temperature != 1:
            hidden = hidden / self.compared.options.temperature  # and so the logits, which are larger
        loss = self.of_hidden(hidden, micro.targets.flatten(), self.chunked, shared=shared)
        if self.compared is None:
            loss = loss.sum()
            return loss + self._of_further(micro, x, layers[len(trunk) :], earlier, shared) if micro.further else loss
        losses = loss.view_as(micro.targets).double()
        if isinstance(self.compared, PolicyLoss):
            return self.compared(losses, micro)
        return losses.sum(dim=1) if earlier is not None else self.compared(losses.sum(dim=1), micro)

    def _of_further(
        self, micro: MicroTensors, x: Tensor, layers: Sequence[str], earlier: Earlier | None, shared: bool
    ) -> Tensor:
        """Returns 0 with the gradient of the loss of the modules `layers` for further tokens (DeepSeek-V3, section 2.2,
        equations 21 to 25), and notes that loss. The first reads `x`, the last block's normalised output, and each
        later one the output of the one before it."""
        model, losses = self.model, list[Tensor]()
        for layer, further in zip(layers, micro.further, strict=True):
            inputs = x, micro.positions, micro.noise, earlier, micro.documents, micro.conversations
            x = model.through([layer], *inputs, model.look_up(further.tokens))
            hidden, targets = model.gathered(x).flatten(0, 1), further.targets.flatten()
            losses.append(self.of_hidden(hidden, targets, self.chunked_further, shared=shared).sum())
        loss = torch.stack(losses).mean()
        if torch.is_grad_enabled():
            self._further.append(loss.detach().double())
        weighted = self.mtp_weight * loss
        return weighted - weighted.detach()

    def take_further(self, like: Tensor) -> Tensor:
        """Returns the losses of the modules for further tokens since the last call, summed over valid targets: (1,)
        fp64 on the device of `like`."""
        found, self._further = self._further, []
        return torch.stack(found).sum(0, keepdim=True) if found else like.new_zeros(1, dtype=torch.float64)

    def of_hidden(self, x: Tensor, targets: Tensor, chunked: ChunkedLoss | None, *, shared: bool) -> Tensor:
        """Returns the losses of `targets` (tokens,), or their sum, from the head's input `x` (tokens, d_model), by
        `chunked` if there is one. `shared`: other losses of it may be waiting for their backward pass."""
        head, embedding = self.model.head, self.model.embed.weight if self.model.config.tied else None
        if isinstance(head, TiledHead):
            return head(x, targets)
        if chunked is None:
            return self.loss(head(x, embedding), targets)
        weight = head.weight if embedding is None else embedding
        assert weight is not None, "a tied head needs the embedding's weight"
        if self.compared is None or not (weight.requires_grad and torch.is_grad_enabled()):
            return chunked(x, head.multiply, weight, targets, shared=shared)
        # What scales the gradients of tokens is known only at the end: of all of a pair's, or of one's own.
        return recomputed_loss(x, head.multiply, weight, targets, chunked.loss, chunked.chunk)

    def counted(self, micro: MicroTensors) -> Tensor:
        """Returns what the mean loss is divided by, of a micro-batch and in fp64: its valid tokens here, or its pairs'
        or completions' share."""
        return (micro.targets != IGNORE).sum().double() if self.compared is None else self.compared.counted(micro)
