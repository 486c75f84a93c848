"""torch's elastic agent for the ranks of one machine, without a network port."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from torch._C._distributed_c10d import HashStore  # torch.distributed.HashStore, which the type stubs do not know
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

from phalanx.launch.attempts import Attempts
from phalanx.launch.handler import QuietHandler
from phalanx.launch.logs import AttemptLogs
from phalanx.launch.processes import RankProcesses

_POLL_S = 0.1


class LoneNode(QuietHandler):
    """The rendezvous of a single agent. The ranks meet through their own file (environment.STORE), not through it."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Returns node 0 of 1, with a store inside this process. Port 0: nothing listens."""
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 0))


class RankAgent(SimpleElasticAgent):
    """The elastic agent, which leaves watching the ranks, judging their end and the decision to restart to `Attempts`.

    torch's own LocalElasticAgent would answer any exit but 0 with SIGTERM to all, and restart whatever the reason."""

    def __init__(self, command: Sequence[str], processes: int, logs: AttemptLogs, attempts: Attempts):
        spec = WorkerSpec(
            role="rank",
            local_world_size=processes,
            rdzv_handler=attempts.rendezvous or LoneNode(),
            entrypoint=sys.executable,  # only its name is used, in torch's events
            max_restarts=attempts.policy.most,
            monitor_interval=_POLL_S,
        )
        super().__init__(spec)
        self._command, self._logs, self._attempts = command, logs, attempts
        self._processes: RankProcesses | None = None

    # The extension points of SimpleElasticAgent; torch's untyped decorator @prof hides some signatures.

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        common = self._attempts.begin()
        environments = {w.local_rank: {**self._variables(worker_group, w), **common} for w in worker_group.workers}
        destination = self._logs.reify(environments)
        command = [*self._command, *(f"++{word}" for word in self._attempts.words)]
        self._processes = RankProcesses(command, environments, destination, self._attempts.standby())
        return dict(self._processes.pids)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._attempts.watch({worker.global_rank: worker.id for worker in worker_group.workers}):
            return RunResult(state=WorkerState.HEALTHY)
        self._stop_workers(worker_group)
        # torch counts down; here the policy decides, and a restart long ago may not count any more.
        again = self._attempts.finish()
        self._remaining_restarts = int(again)
        failed = again or self._attempts.code != 0  # a round that others end is no failure of these ranks
        ended = {worker.global_rank: None for worker in worker_group.workers}
        return RunResult(WorkerState.FAILED) if failed else RunResult(WorkerState.SUCCEEDED, return_values=ended)

    def _exit_barrier(self) -> None:
        """Does nothing: nodes tell each other through their links (launch/nodes), and a lone one has nobody to tell."""

    def _assign_worker_ranks(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Numbers the ranks by node. All nodes have the same number of them, so no store is needed to agree."""
        size = spec.local_world_size
        world, first = group_world_size * size, group_rank * size
        return [Worker(local_rank, first + local_rank, first + local_rank, world, world) for local_rank in range(size)]

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if self._processes is not None:
            self._processes.end()

    def _variables(self, group: WorkerGroup, worker: Worker) -> dict[str, str]:
        """Returns the variables of a rank, as torchrun has them."""
        return {
            "RANK": str(worker.global_rank),
            "LOCAL_RANK": str(worker.local_rank),
            "ROLE_RANK": str(worker.role_rank),
            "GROUP_RANK": str(group.group_rank),
            "WORLD_SIZE": str(worker.world_size),
            "LOCAL_WORLD_SIZE": str(group.spec.local_world_size),
            "ROLE_WORLD_SIZE": str(worker.role_world_size),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "ROLE_NAME": group.spec.role,
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(self._attempts.count - 1),
            "TORCHELASTIC_MAX_RESTARTS": str(group.spec.max_restarts),
            "TORCHELASTIC_RUN_ID": group.spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
