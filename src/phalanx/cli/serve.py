"""`phalanx serve RUN`: a run's newest checkpoint behind OpenAI's HTTP endpoints."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from phalanx.cli.verb import WHOLE, Verb, command_of
from phalanx.echo import echo
from phalanx.errors import JobError
from phalanx.serve.bodies import ServeLimits
from phalanx.train.run_directory import RunDirectory


@dataclass(frozen=True)
class Serve:
    """The options of `phalanx serve`."""

    run: Path
    """The run's directory, such as runs/main."""
    host: str = "127.0.0.1"
    """Address to listen on: loopback, unless another is given."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    name: str = ""
    """The model's name in requests; empty: the directory's."""
    api_key_env: str = "PHALANX_API_KEY"
    """Environment variable with the key that clients must present; no key is needed while it is unset."""
    assistant: Annotated[Path | None, {"value": "RUN"}] = None
    """The run of a smaller model with the same tokenizer, which proposes tokens (speculative decoding)."""
    draft_tokens: Annotated[int, {"at_least": 1}] = 4
    """Tokens that the assistant proposes at a time."""
    step: int = 0
    """The checkpoint of this step; 0 means the newest."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes the accelerator if there is one."""
    limits: ServeLimits = field(default_factory=ServeLimits)


VERB = Verb(
    "serve",
    "Serves a run's newest checkpoint over HTTP, with the completions and chat endpoints of OpenAI's API. It is for "
    "trying a model out; for real load, export the model and use vLLM.",
    {WHOLE: command_of(Serve)},
    (
        ("serve runs/main", "on 127.0.0.1, port 8000"),
        ("serve runs/main --port 0 --batch 16", "on a free port, 16 texts at a time"),
    ),
)


@VERB.starts
def run(argv: Sequence[str]) -> int:
    if VERB.answers_help(argv):
        return 0
    options, problems = VERB.read_as(Serve, argv)
    problems += options.limits.problems()
    if not 0 <= options.port < 1 << 16:
        problems.append(f"port {options.port}: 0 to 65535")
    if problems:
        raise JobError(problems)
    for path in filter(None, (options.run, options.assistant)):
        RunDirectory(path).require()  # before torch is imported, which takes seconds
    try:
        from phalanx.serve import app as server
    except ImportError as error:
        raise JobError(f"{error.name} is not installed: pip install 'phalanx[serve]'") from error
    from phalanx.data.template import ChatPrompts
    from phalanx.generate.engine import Engine
    from phalanx.generate.load import assistant_of, load_run
    from phalanx.serve.app import LOOPBACK, EngineThread, Service

    listener = server.listen(options.host, options.port)  # before the model is loaded, which may take long
    loaded = load_run(options.run, options.step, options.device)
    assistant = None
    if options.assistant:
        assistant = assistant_of(loaded, options.assistant, options.device, options.draft_tokens).decoder
    engine = Engine(loaded.decoder, assistant, draft_tokens=options.draft_tokens, max_batch=options.limits.batch)
    name = options.name or options.run.resolve().name
    key = os.environ.get(options.api_key_env, "")
    chat = ChatPrompts.of_run(options.run, loaded.tokenizer)
    service = Service(name, loaded.tokenizer, EngineThread(engine), options.limits, chat, key, options.host in LOOPBACK)
    host, port = listener.getsockname()[:2]
    echo(f"phalanx: {name} on http://{f'[{host}]' if ':' in host else host}:{port}/v1", file=sys.stderr)
    if not (service.loopback or key):
        echo(f"phalanx: warning: everyone who reaches {host} may use it: set {options.api_key_env}", file=sys.stderr)
    return server.serve(service, listener)
