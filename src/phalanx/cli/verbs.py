"""The verbs, each with what it does and the module that describes and runs it."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.cli.commands import CommandVerb
    from phalanx.cli.job_words import JobVerb

VERBS = {
    "init": "write a job file with a planned layout: five questions, or options",
    "train": "train a job, or resume its run",
    "launch": "start a job under Slurm, PBS, MPI or ssh, or submit it",
    "verify": "check that every layout computes what one process computes",
    "generate": "generate text from the newest checkpoint of a run",
    "serve": "serve a run over HTTP, with OpenAI's endpoints",
    "checkpoint": "list, show, verify, convert and compare checkpoints",
    "import": "weights of another program (Hugging Face) as a run",
    "evaluate": "perplexity of runs on any text, or tasks of lm-eval",
    "export": "write the model of a run as a Hugging Face folder",
    "data": "prepare a corpus: tokenize it into shards",
    "plan": "choose the layout of a job: the fastest that fits, and why",
    "predict": "time, memory and traffic of a step on any machine, without it",
    "report": "a run as a page with pictures, or several runs compared",
    "watch": "the live view of a run, from any terminal",
    "profile": "where the time of profiled steps went, beside the prediction",
    "simulate": "a step as a timeline, with slow devices, links and failures",
    "doctor": "check this machine, or all nodes, before a run",
    "bench": "measure this machine, for predictions on cluster=local",
    "test-dist": "test the started ranks: collectives, stragglers, slow pairs",
    "models": "known models, with parameters, kinds and sources",
    "schedule": "pipeline schedules: list, draw, measure and check them",
    "collectives": "algorithms of collectives: list, draw, count and check them",
    "schema": "every field of a job: as JSON schema for editors, or as a page",
    "completion": "completion of verbs, options and fields for bash, zsh or fish",
    "examples": "write the example jobs, or list them",
    "docs": "print a page of the documentation, or list the pages",
    "extensions": "what installed packages add: schedules, machines, corpora",
}
EXIT_CODES = {
    "0": "done",
    "1": "failed",
    "2": "bad usage or job",
    "3": "does not fit",
    "4": "data, checkpoint or state corrupt",
    "5": "stopped on NaN or a spike",
    "75": "stopped cleanly (run the same command again to resume)",
    "124": "ended by the watchdog",
    "128+n": "ended by signal n",
}
"""The exit codes of all verbs."""


def module_of(verb: str) -> ModuleType:
    """Imports and returns the module of a verb."""
    return importlib.import_module(f"phalanx.cli.{'import_' if verb == 'import' else verb.replace('-', '_')}")


def description_of(verb: str) -> JobVerb | CommandVerb:
    """Returns what a verb takes."""
    return module_of(verb).VERB
