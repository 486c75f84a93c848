"""What the ranks of one launch can compute or leave for each other."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import RunError
from phalanx.launch.meet import store
from phalanx.launch.meet.store import Board, Offer, first_host, listening_socket, own_addresses
from phalanx.launch.ranks import Ranks

OFFER = Offer(("10.0.0.1", "fe80::1"), 12345, "token")
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[09-10]",
    "SLURM_LAUNCH_NODE_IPADDR": "login",
}


def ranks(source: str) -> Ranks:
    return Ranks(1, 4, 1, 2, 0, source)


def test_an_offer_is_read_as_it_was_written(tmp_path: Path) -> None:
    board = Board.of("slurm 7", {"XDG_STATE_HOME": str(tmp_path)}, one_node=False)
    assert board.read() == []
    board.write(OFFER)
    assert board.read() == [OFFER]
    assert board.path.parent.stat().st_mode & 0o777 == 0o700
    board.remove()
    assert board.read() == []


def test_a_folder_of_somebody_else_is_not_believed(tmp_path: Path) -> None:
    board = Board.of("slurm 7", {"XDG_STATE_HOME": str(tmp_path)}, one_node=False)
    board.write(OFFER)
    board.path.parent.chmod(0o777)
    assert board.read() == []
    with pytest.raises(RunError, match="is writable by others"):
        board.write(OFFER)


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    board = Board.of("slurm 7", {"XDG_STATE_HOME": str(tmp_path)}, one_node=False)
    board.write(OFFER)
    (tmp_path / "theirs").write_text("mine")
    board.path.unlink()
    board.path.symlink_to(tmp_path / "theirs")
    board.write(OFFER)
    assert (tmp_path / "theirs").read_text() == "mine"


@given(st.text(max_size=300))
def test_any_word_is_an_offer_or_a_value_error(text: str) -> None:
    try:
        offer = Offer.decode(text)
    except ValueError:
        return
    assert offer.port


def test_a_launch_has_a_name_of_its_own() -> None:
    name = store.name_of(ranks("slurm"), SLURM)
    assert name is not None
    assert name != store.name_of(ranks("slurm"), {**SLURM, "SLURM_STEP_ID": "1"})
    assert name != store.name_of(ranks("slurm"), {**SLURM, "SLURM_RESTART_COUNT": "1"})
    assert store.name_of(ranks("slurm"), {"SLURM_JOB_ID": "7"}) is None
    assert store.name_of(ranks("torchrun"), SLURM) is None
    ports = store.ports_of(name)
    assert len(set(ports)) > 1
    assert all(10_000 <= port < 30_000 for port in ports)


def test_the_first_host_of_the_step(tmp_path: Path) -> None:
    assert first_host(ranks("slurm"), SLURM) == "n09"
    assert first_host(ranks("slurm"), {"SLURM_STEP_NODELIST": "n["}) is None
    (tmp_path / "nodes").write_text("x3001\nx3002\n")
    assert first_host(ranks("pals"), {"PBS_NODEFILE": str(tmp_path / "nodes")}) == "x3001"
    assert first_host(ranks("pals"), {"PBS_NODEFILE": str(tmp_path / "none")}) is None


def test_a_port_is_held_from_the_moment_it_is_chosen() -> None:
    with listening_socket((0,), one_node=True) as first:
        taken = first.getsockname()[1]
        assert first.getsockname()[0] == "127.0.0.1"
        with listening_socket((taken, 0), one_node=True) as second:
            assert second.getsockname()[1] != taken
        with pytest.raises(OSError, match="in use"):
            listening_socket((taken,), one_node=True)


def test_own_addresses_begin_with_what_the_user_names() -> None:
    if len(own_addresses({})) > 1:
        assert own_addresses({})[0] not in ("127.0.0.1", "::1")
    assert own_addresses({"GLOO_SOCKET_IFNAME": "lo"})[0] in ("127.0.0.1", "::1")
    for address in own_addresses(os.environ):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as probe:
            probe.bind((address, 0))
