"""`phalanx generate RUN`: text from a run's newest checkpoint."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from phalanx.cli.commands import flag_of
from phalanx.echo import echo
from phalanx.errors import JobError
from phalanx.launch.environment import LOG_DIR
from phalanx.launch.lifeline import die_with_launcher
from phalanx.launch.meet.detected import detected
from phalanx.launch.ranks import Ranks
from phalanx.nearest import did_you_mean

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed.Store, to the type stubs

    from phalanx.generate.load import LoadedRun


@dataclass(frozen=True)
class Generate:
    """Generate text from a run's newest checkpoint (or that of --step). The same seed gives the same text."""

    run: tyro.conf.Positional[Path]
    """The run's directory, such as runs/main."""
    prompt: str = "\n"
    """Beginning of the text."""
    max_new_tokens: int = 200
    """Tokens to generate."""
    temperature: float = 0.8
    """Divides the logits; 0 takes the most likely token each time (greedy)."""
    top_k: int = 0
    """Sample from the k most likely tokens only; 0 samples from all."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probabilities sum to p; 1 samples from all."""
    seed: int = 1337
    """Seed of the sampling."""
    step: int = 0
    """The checkpoint of this step; 0 means the newest."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto uses the accelerator if there is one."""
    pp: int = 1
    """Pipeline ranks that share the layers, for a model that does not fit on one device."""
    json: bool = False
    """Print one JSON document on standard output and nothing else."""


def run(argv: Sequence[str]) -> int:
    die_with_launcher()
    ranks = detected(os.environ)
    if ranks is not None and LOG_DIR not in os.environ:
        return _be_a_foreign_rank(argv, ranks)
    options = _parse(argv)
    if ranks is not None:  # the launcher below started this process
        return _be_a_rank(options, ranks)
    if options.pp == 1:
        from phalanx.generate.load import load_run

        _write(load_run(options.run, options.step, options.device), options)
        return 0
    from phalanx.generate import pipelined

    return pipelined.launch(["generate", *argv], options.run, options.step, options.pp)


def _parse(argv: Sequence[str], prints: bool = True) -> Generate:
    """Returns the options. What tyro prints about wrong ones, before it ends the program, only one rank `prints`."""
    options, unknown = tyro.cli(
        Generate,
        prog="phalanx generate",
        args=argv,
        config=(tyro.conf.FlagCreatePairsOff,),
        console_outputs=prints,
        return_unknown_args=True,  # tyro would print their control characters
    )
    if unknown:
        raise JobError([_unknown(word) for word in unknown])
    return options


def _be_a_foreign_rank(argv: Sequence[str], ranks: Ranks) -> int:
    """Generates as one of the processes that torchrun, srun or mpiexec started. A mistake of several is one message."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or every lost peer prints the stack of torch's C++
    from phalanx.config.run import RunOptions
    from phalanx.launch.lost_peer import lost_peer_named
    from phalanx.launch.meet.meeting import Meeting

    meeting = Meeting(ranks)
    with meeting.agreed():
        options = _parse(argv, prints=ranks.rank == 0)
        if options.pp != ranks.world:
            raise JobError(
                f"{ranks.source} started {ranks.world} processes, but --pp is {options.pp}: give --pp {ranks.world}, "
                f"which cuts the layers into {ranks.world} parts, or start {options.pp}"
            )
        ranks = meeting.join(RunOptions().timeout_s)
        with lost_peer_named(ranks):
            return _be_a_rank(options, ranks, meeting.store)


def _be_a_rank(options: Generate, ranks: Ranks, store: Store | None = None) -> int:
    from phalanx.generate import pipelined

    with pipelined.joined(ranks, options.run, options.step, options.device, options.pp, store) as loaded:
        _write(loaded, options, prints=ranks.rank == 0)
    return 0


def _unknown(word: str) -> str:
    names = [flag_of(field.name) for field in dataclasses.fields(Generate)]
    return f"unknown option {word}{did_you_mean(word.partition('=')[0], names) if word.startswith('--') else ''}"


def _write(loaded: LoadedRun, options: Generate, prints: bool = True) -> None:
    """Generates the text and prints it; of several ranks only the one that `prints`."""
    live = prints and sys.stdout.isatty() and not options.json
    if live:
        echo(options.prompt, end="", flush=True)
    text = loaded.text(
        options.prompt,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        on_text=(lambda piece: echo(piece, end="", flush=True)) if live else None,
    )
    if not prints:
        return
    if options.json:
        echo(json.dumps({**dataclasses.asdict(options), "run": str(options.run), "text": text}))
    elif live:
        echo()
    else:
        sys.stdout.write(f"{text}\n")  # a pipe or a file gets the text as it is
