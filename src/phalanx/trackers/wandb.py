"""Weights & Biases. A run keeps its id over all attempts. W&B cannot take a step back, so each is sent once.

It is offline, in RUN/trackers/wandb, unless WANDB_MODE says otherwise, or a key is there to log in with: WANDB_API_KEY,
or the line of W&B's host in ~/.netrc, which `wandb login` writes.
"""

from __future__ import annotations

import netrc
import os
import secrets
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from phalanx.trackers.tracker import TrackedRun, Tracker

HOST = "https://api.wandb.ai"
PROJECT = "phalanx"


class WandbTracker(Tracker):
    """Logs to the run that `notes["id"]` names. Variables of W&B's own win: WANDB_PROJECT, WANDB_RUN_ID, and so on."""

    def __init__(self, run: TrackedRun):
        self._wandb = wandb = import_module("wandb")
        run.notes["id"] = os.environ.get("WANDB_RUN_ID") or run.notes.get("id") or secrets.token_hex(4)
        self._run: Any = wandb.init(
            id=run.notes["id"],
            resume=os.environ.get("WANDB_RESUME") or "allow",
            mode=mode(os.environ),
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=os.environ.get("WANDB_NAME") or run.name,
            dir=os.environ.get("WANDB_DIR") or str(run.folder),
            config={**run.hyperparameters(), "facts": dict(run.facts)},
            settings=wandb.Settings(console="off", disable_git=True, save_code=False),
        )
        self._step = run.step or 0

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        self._step = step
        self._run.log(dict(values), step=step)

    def file(self, path: Path) -> None:
        if path.suffix in (".svg", ".html"):
            page = self._wandb.Html(path.read_text(encoding="utf-8"), inject=False)
            self._run.log({f"pictures/{path.stem}": page}, step=self._step, commit=False)
        else:
            self._run.save(str(path), base_path=str(path.parent), policy="now")

    def close(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=int(status in ("failed", "killed")))
        self._wandb.teardown()  # or its service would end some time after this process


def mode(environment: Mapping[str, str]) -> str:
    """Returns W&B's mode: what the environment asks for, else "online" if there is a key to log in with."""
    if asked := environment.get("WANDB_MODE"):
        return asked
    return "online" if environment.get("WANDB_API_KEY") or _is_in_netrc(environment) else "offline"


def _is_in_netrc(environment: Mapping[str, str]) -> bool:
    host = urlsplit(environment.get("WANDB_BASE_URL") or HOST).hostname or ""
    try:
        return netrc.netrc(environment.get("NETRC") or None).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
