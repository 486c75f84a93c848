"""One micro-batch on the device, and parts of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from phalanx.model.documents import Conversations, Documents
from phalanx.model.noise import Noise


@dataclass(frozen=True)
class MicroTensors:
    """The inputs of one forward pass of one rank."""

    tokens: Tensor
    """(micro_batch, seq), int64: seq_len tokens, or a context-parallel rank's part of them."""
    targets: Tensor
    """(micro_batch, seq), int64, IGNORE where a position does not count."""
    noise: Noise | None = None
    """The source of dropout masks; None without dropout."""
    places: Tensor | None = None
    """Positions, within their sequences, of the tokens here, (seq,); None if all are here."""
    documents: Documents | None = None
    """Those of the whole sequences, if attention must not cross them."""
    reference: Tensor | None = None
    """(micro_batch,), float64: of preference pairs, the log-probability of each whole sequence's answer by the
    reference model; NaN for padding."""
    conversations: Conversations | None = None
    """What routers count; None if every sequence is one conversation without padding."""

    @property
    def positions(self) -> Tensor:
        """The tokens' positions within their sequences, (seq,)."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) if self.places is None else self.places

    def part(self, chosen: slice) -> MicroTensors:
        """Returns some of its samples."""
        noise = self.noise and replace(self.noise, sample_ids=self.noise.sample_ids[chosen])
        documents = None if self.documents is None else self.documents.part(chosen)
        reference = None if self.reference is None else self.reference[chosen]
        conversations = None if self.conversations is None else self.conversations.part(chosen)
        return replace(
            self,
            tokens=self.tokens[chosen],
            targets=self.targets[chosen],
            noise=noise,
            documents=documents,
            reference=reference,
            conversations=conversations,
        )

    def slice(self, number: int, slices: int) -> MicroTensors:
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
            conversations=conversations,
        )
