"""The attempts of a node's launcher: as those of a lone one, but the host may end them, and others' failures count."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from phalanx.launch.attempts import Attempts, headline, say, tell
from phalanx.launch.logs import AttemptLogs
from phalanx.launch.lost_peer import TEXTS
from phalanx.launch.nodes.messages import Ending, NodeFailure
from phalanx.launch.nodes.node import NodeRendezvous
from phalanx.launch.processes import NodePart
from phalanx.launch.restart import Failure, Restarts
from phalanx.launch.supervisor import StopSignals, Supervisor

_EXPLANATION_S = 2.0
"""Seconds for which a node whose ranks lost their peers waits for the host to say why."""
_LOST = (*TEXTS, "did not come")


class NodeAttempts(Attempts):
    """Begins, watches and judges this node's part in one round after the other."""

    def __init__(
        self,
        logs: AttemptLogs,
        new_supervisor: Callable[[StopSignals], Supervisor],
        stopped: str,
        restarts: Restarts,
        node: Callable[[StopSignals], NodeRendezvous],
    ):
        super().__init__(logs, new_supervisor, stopped, restarts)
        self.node = node(self.signals)
        self._ending: Ending | None = None
        self._noticed = 0.0

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        message = ""
        if over := self.node.over:
            self.code, message = over.code, over.message
            if message:
                say(message)
        self.node.link.close(self.code, message or f"the host has ended with exit code {self.code}")

    def part(self) -> NodePart | None:
        return self.node.next_round()

    @property
    def words(self) -> Sequence[str]:
        current = self.node.round
        return current.words if current else ()

    def begin(self) -> dict[str, str]:
        current = self.node.round
        assert current is not None, "no round has begun"
        self.logs.shared_attempt = current.attempt
        self.world = self.node.world
        if current.reason:
            self._restarted = {"attempt": self.count, "reason": current.reason, "time": self._noticed or time.time()}
        self._ending, self._noticed = None, 0.0
        return {**super().begin(), **self.node.variables}

    def watch(self, pids: Mapping[int, int]) -> bool:
        if self._ending is None and (ending := self.node.ending) is not None:
            self._ending, self._noticed = ending, time.time()
            self.supervisor.end(saves=ending.saves)
        return super().watch(pids)

    def finish(self) -> bool:
        self.code, message, failure = self._judge(self.supervisor)
        if self.signals.requests:
            tell(self.code, message, self.logs.attempt_dir)
            self.node.done()
            return False
        lost = failure is not None and _lost_its_peers(failure)
        if lost or failure is None:
            self._await_ending(any_kind=lost)
        self._noticed = self._noticed or min(ended.time for ended in self.supervisor.exits.values())
        if self._ending is not None:
            say(f"the round ends: {self._ending.reason}")
            return True
        if failure is None:
            tell(self.code, message, self.logs.attempt_dir)
            self.node.done()
            return False
        tell(self.code, message, self.logs.attempt_dir)
        decision = self.policy.decide(failure)
        if decision.sentence:
            say(decision.sentence)
        if not (lost and decision.restart):
            self.node.failed(NodeFailure(self.code, headline(message), final=not decision.restart))
        return decision.restart

    def _await_ending(self, *, any_kind: bool) -> None:
        """Waits for the host's explanation of why the ranks have ended: `any_kind`, or a stop that all nodes make."""
        if self.code == 0:
            return
        end = time.monotonic() + _EXPLANATION_S
        while self._ending is None and time.monotonic() < end:
            ending = self.node.ending
            if ending is not None and (any_kind or ending.saves):
                self._ending = ending
            time.sleep(0.05)


def _lost_its_peers(failure: Failure) -> bool:
    report = failure.first.report if failure.first else None
    return report is not None and any(text in report.message for text in _LOST)
