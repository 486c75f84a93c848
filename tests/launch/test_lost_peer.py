"""Errors about a lost connection become one message; other errors stay what they are."""

from __future__ import annotations

import pytest

from phalanx.errors import RunError
from phalanx.launch.ranks import Ranks
from phalanx.launch.verdict import lost_peer_named

RANKS = Ranks(1, 4, 0, 1, 1, "mpich")


@pytest.mark.parametrize(
    ("text", "peer", "shown"),
    [
        ("[/src/gloo/pair.cc:547] Connection closed by peer [10.0.0.2]:4242", "a rank on 10.0.0.2", "(Connection"),
        (
            "trace\n[/src/pair.cc:1] Read error [fe80::2]:42: Connection reset by peer. This is typically caused by x",
            "a rank on fe80::2",
            "Connection reset by peer)",
        ),
        ("[/src/unbound_buffer.cc:78] Timed out waiting 15000ms for recv operation", "rank(s)", "(Timed out"),
    ],
)
def test_the_backend_s_error_becomes_a_message(text: str, peer: str, shown: str) -> None:
    with pytest.raises(RunError, match=r"^rank 1 of 4 on \S+ lost ") as caught, lost_peer_named(RANKS):
        raise RuntimeError(text)
    assert f"lost {peer}: another rank ended, hangs, or its connection broke while this one waited" in str(caught.value)
    assert shown in str(caught.value)


def test_another_error_is_a_bug() -> None:
    with pytest.raises(RuntimeError, match="shape mismatch"), lost_peer_named(RANKS):
        raise RuntimeError("shape mismatch")
