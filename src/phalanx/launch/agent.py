"""torch's elastic agent for the ranks of one machine, without a network port."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch._C._distributed_c10d import HashStore  # torch.distributed.HashStore, which the type stubs do not know
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from phalanx.launch.logs import AttemptLogs
from phalanx.launch.supervisor import Supervisor

_MAX_RESTARTS = 0  # a restart of ranks would be configured here and decided in RankAgent
_POLL_S = 0.1


class LoneNode(RendezvousHandler):
    """A rendezvous of a single agent.

    torch's rendezvous backends listen on all interfaces, pickle their state, or wait for other nodes; one machine needs
    none of that. The ranks meet through their own file (environment.STORE), not through the agent.
    """

    @property
    def use_agent_store(self) -> bool:
        """Returns False: the workers get no store from the agent."""
        return False

    def get_backend(self) -> str:
        """Returns the name of this rendezvous backend."""
        return "lone-node"

    def next_rendezvous(self) -> RendezvousInfo:
        """Returns node 0 of 1, with a store inside this process. Port 0: nothing listens."""
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 0))

    def is_closed(self) -> bool:
        """Returns False: no other node could close it."""
        return False

    def set_closed(self) -> None:
        """Does nothing: there is no other node."""

    def num_nodes_waiting(self) -> int:
        """Returns 0: no node joins late."""
        return 0

    def get_run_id(self) -> str:
        """Returns the id that workers see as TORCHELASTIC_RUN_ID."""
        return "phalanx"

    def shutdown(self) -> bool:
        """Returns True: there is nothing to close."""
        return True


class RankAgent(LocalElasticAgent):
    """The elastic agent, which asks the supervisor first and acts only after every rank has ended."""

    def __init__(self, command: Sequence[str], processes: int, logs: AttemptLogs, supervisor: Supervisor):
        spec = WorkerSpec(
            role="rank",
            local_world_size=processes,
            rdzv_handler=LoneNode(),
            entrypoint=sys.executable,
            # The agent substitutes ${local_rank} and turns $$ into $: the user's text must survive that.
            args=tuple(word.replace("$", "$$") for word in command),
            max_restarts=_MAX_RESTARTS,
            monitor_interval=_POLL_S,
        )
        super().__init__(spec, logs, log_line_prefix_template="[rank ${rank}] ")
        self._supervisor = supervisor

    # The extension point of SimpleElasticAgent; torch's untyped decorator @prof hides its signature.
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self._supervisor.watch({worker.global_rank: worker.id for worker in worker_group.workers}):
            return RunResult(state=WorkerState.HEALTHY)
        return super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue]
