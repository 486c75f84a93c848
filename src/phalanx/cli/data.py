"""`phalanx data prepare JOB`: builds the token shards of a job's data, and describes them."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.cli.job_words import JobVerb
from phalanx.errors import JobError

VERB = JobVerb(
    "data prepare",
    "Prepares a job's corpus: tokenizes it into shards with an index and checksums. `phalanx train` does "
    "this too if it has not been done. A stopped preparation resumes where it was.",
    (
        ("data prepare examples/main.yaml", "the corpus of a job"),
        ("data prepare data=text data.path=book.txt tokenizer=bpe", "your own text"),
    ),
    {
        "force": "Rebuild all shards, including existing ones.",
        "verify": "Read every shard and compare its checksum.",
    },
    exits={4: "the corpus or a shard is corrupt or missing"},
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
        words.job.data,
        words.job.model.seq_len,
        force="force" in chosen,
        verify="verify" in chosen,
        as_json="json" in chosen,
    )
