"""The part of torch's rendezvous interface that is the same for a lone node and for one of several."""

from __future__ import annotations

from torch.distributed.elastic.rendezvous import RendezvousHandler


class QuietHandler(RendezvousHandler):
    """Answers what torch's agent asks beside the next rendezvous. torch's own backends listen on all interfaces and
    unpickle what arrives: nodes of ours tell each other by their own links (launch/nodes) who comes and who goes."""

    @property
    def use_agent_store(self) -> bool:
        """Returns False: the workers get no store from the agent."""
        return False

    def get_backend(self) -> str:
        """Returns the name of this rendezvous backend."""
        return "phalanx"

    def is_closed(self) -> bool:
        """Returns False: `next_rendezvous` tells that no round follows."""
        return False

    def set_closed(self) -> None:
        """Does nothing: the agent does not decide about other nodes."""

    def num_nodes_waiting(self) -> int:
        """Returns 0: the agent restarts no ranks for a node that joins."""
        return 0

    def get_run_id(self) -> str:
        """Returns the id that workers see as TORCHELASTIC_RUN_ID."""
        return "phalanx"

    def shutdown(self) -> bool:
        """Returns True: the agent has nothing to close."""
        return True
