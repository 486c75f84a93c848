"""`phalanx data prepare JOB` builds the token shards of a job's data; `phalanx data inspect FILE` says what a file
holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from phalanx.cli.verb import Option, Verb, Words, alone, job_verb
from phalanx.echo import echo
from phalanx.errors import JobError

VERB = job_verb(
    "data prepare",
    "Prepares a job's corpus: tokenizes it into shards with an index and checksums. `phalanx train` does "
    "this too if it has not been done. A stopped preparation resumes where it was.",
    (
        ("data prepare examples/main.yaml", "the corpus of a job"),
        ("data prepare data=text data.path=book.txt tokenizer=bpe", "your own text"),
    ),
    {"force": "Rebuild all shards, including existing ones.", "verify": "Read every shard and compare its checksum."},
    exits={4: "the corpus or a shard is corrupt or missing"},
    auto="open",
)


INSPECT = Verb(
    "data inspect",
    "Says what a data file holds and how it would be read: its form, its fields, its roles, and the first sample with "
    "what is trained on marked «so». Of a job file: the sources of its mixture, and how much of each it draws. Nothing "
    "is written.",
    alone(("FILE",), {"template": Option("chat template that renders the sample", "chatml", value="NAME|FILE")}),
    (
        ("data inspect rows.json --template alpaca", "conversations, pairs or text, with a template"),
        ("data inspect job.yaml", "the sources of a mixture"),
    ),
    exits={4: "rows cannot be used"},
)


@VERB.starts
def run(argv: Sequence[str]) -> int:
    if argv and argv[0] == "inspect":
        asked = INSPECT.parse(argv[1:] or ["--help"])
        return 0 if asked is None else _inspect(asked)
    if not argv or argv[0] != "prepare":
        if argv and argv[0] not in ("-h", "--help"):
            raise JobError(
                f"phalanx data has the commands prepare and inspect, not {argv[0]!r}: phalanx data prepare [JOB.yaml]"
            )
        argv = ["prepare", "--help"]
    words = VERB.parse(argv[1:])
    if words is None:
        return 0
    from phalanx.data.inspect import prepare_and_report

    chosen = words.switches
    return prepare_and_report(
        words.job.data,
        words.job.model.seq_len,
        force="force" in chosen,
        verify="verify" in chosen,
        as_json="json" in chosen,
    )


def _inspect(words: Words) -> int:
    from phalanx.data.inspect import inspected

    found = inspected(Path(words.subject), words.options["template"])
    if words.as_json:
        echo(json.dumps(found, indent=1, ensure_ascii=False))
        return 4 if "problems" in found else 0
    sample = found.pop("sample", None)
    sources = found.pop("sources", [])
    for name, value in found.items():
        between = "\n  " if name == "problems" else ", "
        text = between.join(map(str, value)) if isinstance(value, list) else value
        echo(f"{name.replace('_', ' ') + ':':<10} {text}", wrap=True)
    for source in sources:
        drawn = f"{source['weight']:.2%} of the samples: {source['samples']:,}"
        passes = f", {source['epochs']:.2f} epochs of {source['tokens']:,} tokens" if "epochs" in source else ""
        echo(f"source:    {source['path']} ({source['form']}): {drawn}{passes or ', not prepared yet'}", wrap=True)
    if sample:
        echo("sample:")
        echo("".join(f"«{part['text']}»" if part["trained"] else part["text"] for part in sample).rstrip("\n"))
    return 4 if "problems" in found else 0
