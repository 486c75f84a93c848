"""`phalanx generate RUN`: text from a run's newest checkpoint."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro


@dataclass(frozen=True)
class Generate:
    """Generate text from a run's newest checkpoint (or that of --step). The same seed gives the same text."""

    run: tyro.conf.Positional[Path]
    """The run's directory, such as runs/main."""
    prompt: str = "\n"
    """What the text begins with."""
    max_new_tokens: int = 200
    """Tokens to generate."""
    temperature: float = 0.8
    """Divides the logits; 0 takes the likeliest token each time (greedy)."""
    top_k: int = 0
    """Draw from the k likeliest tokens only; 0 draws from all."""
    top_p: float = 1.0
    """Draw from the fewest tokens whose probabilities reach p; 1 draws from all."""
    seed: int = 1337
    """Of the draws."""
    step: int = 0
    """The checkpoint of this step; 0 means the newest."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the accelerator where there is one."""
    json: bool = False
    """Print one JSON document on standard output and nothing else."""


def run(argv: Sequence[str]) -> int:
    options = tyro.cli(Generate, prog="phalanx generate", args=argv, config=(tyro.conf.FlagCreatePairsOff,))
    from phalanx.generate.load import load_run

    loaded = load_run(options.run, options.step, options.device)
    live = sys.stdout.isatty() and not options.json
    if live:
        print(options.prompt, end="", flush=True)
    text = loaded.text(
        options.prompt,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        on_text=(lambda piece: print(piece, end="", flush=True)) if live else None,
    )
    if options.json:
        print(json.dumps({**dataclasses.asdict(options), "run": str(options.run), "text": text}, ensure_ascii=False))
    else:
        print("" if live else text)
    return 0
