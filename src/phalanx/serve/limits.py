"""Limits on requests and connections."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class ServeLimits:
    """The limits of one server."""

    batch: int = 8
    """Texts that are computed together at most."""
    queue: int = 32
    """Texts that wait at most; a request with more gets 429."""
    max_tokens: int = 4096
    """New tokens per text at most."""
    max_prompt: int = 0
    """Prompt tokens at most; 0: what the model's context holds."""
    max_body: int = 1 << 20
    """Bytes of a request at most; a larger one gets 413."""
    timeout: float = 300.0
    """Seconds from a request to its last token at most."""
    grace: float = 30.0
    """Seconds that requests have to end after SIGTERM."""

    def problems(self) -> Iterator[str]:
        """Yields every limit that would let nothing through."""
        for limit in fields(self):
            value = getattr(self, limit.name)
            least = 0 if limit.name in ("queue", "max_prompt", "grace") else 1
            if value < least:
                yield f"{limit.name} {value}: at least {least}"
