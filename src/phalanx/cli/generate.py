"""`phalanx generate RUN`: text from a run's newest checkpoint."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from phalanx.errors import CheckpointError


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
    device: str = "auto"
    """auto, cpu or cuda."""
    json: bool = False
    """Print one JSON document on standard output and nothing else."""


def run(argv: Sequence[str]) -> int:
    options = tyro.cli(Generate, prog="phalanx generate", args=argv, config=(tyro.conf.FlagCreatePairsOff,))
    text = _generate(options, stream=sys.stdout.isatty() and not options.json)
    if options.json:
        print(json.dumps({**dataclasses.asdict(options), "run": str(options.run), "text": text}, ensure_ascii=False))
    elif text:
        print(text)
    return 0


def _generate(options: Generate, stream: bool) -> str:
    """The text, prompt included; with `stream` it is printed as it comes, and the result is empty."""
    import torch

    from phalanx.generate.load import load_run
    from phalanx.generate.sampling import generate

    loaded = load_run(options.run, options.step, options.device)
    ids = loaded.tokenizer.encode(options.prompt)
    if not len(ids):
        raise CheckpointError("the prompt is empty; give at least one character with --prompt")
    prompt = torch.from_numpy(ids.astype("int64"))[None].to(loaded.device)
    shown = ""

    def show(token: torch.Tensor) -> None:
        # Decoded as a whole each time: a character may be made of several tokens.
        nonlocal shown, sofar
        sofar = torch.cat((sofar, token.cpu()))
        text = loaded.tokenizer.decode(sofar.numpy())
        if text.startswith(shown) and not text.endswith("\ufffd"):
            print(text[len(shown) :], end="", flush=True)
            shown = text

    sofar = prompt[0].cpu()
    if stream:
        print(options.prompt, end="", flush=True)
        shown = loaded.tokenizer.decode(sofar.numpy())
    tokens = generate(
        loaded.model,
        prompt,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        on_token=show if stream else None,
    )
    if stream:
        print()
        return ""
    return loaded.tokenizer.decode(tokens[0].cpu().numpy())
