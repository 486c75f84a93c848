"""The message that independent replicas exchange when they synchronize: requests, or a problem."""

from __future__ import annotations

import torch

from phalanx.comm.axis import Axis
from phalanx.errors import NotFiniteError
from phalanx.partition.tensor_slices import STOP_MESSAGE_BYTES
from phalanx.train.requests import Requests


def synchronize(replicas: Axis, device: torch.device, requests: Requests, problem: str) -> Requests:
    """Waits for all replicas. Returns the requests of any of them.

    A `problem` keeps its replica from continuing: all raise NotFiniteError with the first replica's."""
    message = (bytes([requests.stop + 2 * requests.save]) + problem.encode())[:STOP_MESSAGE_BYTES]
    mine = torch.zeros(STOP_MESSAGE_BYTES, dtype=torch.uint8)
    mine[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    every = torch.empty(replicas.size, STOP_MESSAGE_BYTES, dtype=torch.uint8, device=device)
    replicas.all_gather(every.view(-1), mine.to(device)).wait()
    rows = [row.tobytes() for row in every.cpu().numpy()]
    for replica, row in enumerate(rows):
        if text := row[1:].rstrip(b"\0").decode(errors="ignore"):
            raise NotFiniteError(f"replica {replica}, {text}")
    return Requests(stop=any(row[0] & 1 for row in rows), save=any(row[0] & 2 for row in rows))
