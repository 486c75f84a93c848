"""`phalanx data prepare JOB`: make the token shards of a job's data, and say what they are."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.cli.job_words import JobVerb
from phalanx.errors import JobError

VERB = JobVerb(
    "data prepare",
    "Prepare a job's corpus: tokenize it into memory-mapped shards with an index and checksums. `phalanx train` does "
    "this too, where it is not done yet. A preparation that was stopped goes on where it was.",
    {
        "force": "Make all shards again, even those that are there.",
        "verify": "Read every shard and compare it with its digest.",
    },
    auto="open",
)


def run(argv: Sequence[str]) -> int:
    if not argv or argv[0] != "prepare":
        if argv and argv[0] not in ("-h", "--help"):
            raise JobError(f"phalanx data has one command, prepare, not {argv[0]!r}: phalanx data prepare [JOB.yaml]")
        argv = ["prepare", "--help"]
    words = VERB.parse(argv[1:])
    if words is None:
        return 0
    from phalanx.data.report import prepare_and_report

    chosen = words.switches
    return prepare_and_report(
        words.job.data, force="force" in chosen, verify="verify" in chosen, as_json="json" in chosen
    )
