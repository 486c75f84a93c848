"""Names of other programs whose value here depends on other fields of the job (config/aliases.py): the rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from phalanx.config import values
from phalanx.config.aliases import ALIASES, Derived
from phalanx.config.fields import get, leaves, replace
from phalanx.config.job import Job
from phalanx.partition.derived import solve


@dataclass(frozen=True)
class _Around:
    """What a rule may look at besides its own value."""

    job: Job
    """The job with every other setting."""
    given: Mapping[str, str]
    """Fields that the command line sets itself, with their origins."""
    origins: Mapping[str, str]
    derived: Mapping[str, str]
    """The values of all names with a rule."""


def apply(
    job: Job, asked: Sequence[Derived], given: Mapping[str, str], origins: dict[str, str]
) -> tuple[Job, list[str], list[str]]:
    """Returns the job with the fields that names with a rule set, answers for the user, and problems. `given` are the
    fields that the command line sets itself, with their origins: a name with a rule that would change one is a problem.
    `origins` gets those of the new values."""
    answers: list[str] = []
    problems: list[str] = []
    for name, rule in RULES.items():
        one = next((each for each in reversed(asked) if each.name == name), None)
        if one is None:
            continue
        try:
            found = rule(one.text, _Around(job, given, origins, {each.name: each.text for each in asked}))
            changed = {path: values.convert(text, leaves()[path]) for path, text in found.items()}
        except ValueError as error:
            problems.append(f"{one.origin}: {error}")
            continue
        except (OverflowError, ZeroDivisionError):
            problems.append(f"{one.origin}: gives no legal value with the job's other fields")
            continue
        clashes = [path for path in changed if path in given and get(job, path) != changed[path]]
        problems += [f"{_both(one.origin, given[path])} {path} {found[path]} and {get(job, path)}" for path in clashes]
        for path, value in changed.items():
            job = replace(job, path, value)
            origins[path] = one.origin
        answers.append(f"{_word(one.origin)}: taken as {', '.join(f'{path}={text}' for path, text in found.items())}")
    return job, answers, problems


def equation(job: Job, asked: Sequence[Derived]) -> str:
    """Returns the batch equation of a checked job, if a name that changes the batch was given, or nothing."""
    changes = any(ALIASES[each.name].path in ("layout.micro_batch", "layout.accumulation") for each in asked)
    return solve(job.train.global_batch, job.layout).equation() if changes and not job.layout.auto else ""


def _both(one: str, other: str) -> str:
    return f"{one} and {_word(other)} contradict each other; give one of them:"


def _word(origin: str) -> str:
    return origin.removeprefix("command line: ")


def _backend(text: str, around: _Around) -> dict[str, str]:
    """DDP replicates over all data ranks, FSDP and DeepSpeed shard over them (wordplay and `ezpz test`)."""
    layout, name = around.job.layout, text.lower()
    if name not in ("ddp", "fsdp", "deepspeed", "ds"):
        raise ValueError(
            f"expected DDP, FSDP or deepspeed, found {text!r}; the communication library follows from cluster.device "
            "(gloo on a CPU, NCCL on a GPU)"
        )
    # A planner that chooses the number of ranks is told only which of the two axes it may use.
    ranks = "" if layout.auto else str(layout.data_ranks)
    mine, other = ("dp_replicate", "dp_shard") if name == "ddp" else ("dp_shard", "dp_replicate")
    found = {f"layout.{mine}": ranks, f"layout.{other}": "1"}
    if name == "fsdp" and layout.zero == 1:
        found["layout.zero"] = "3"
    elif name in ("deepspeed", "ds") and around.origins["layout.zero"] == "default":
        found["layout.zero"] = "1"  # as in wordplay's ds_config.yaml
    return {path: value for path, value in found.items() if value}


def _accumulation(text: str, around: _Around) -> dict[str, str]:
    """nanoGPT and wordplay divide the number by the ranks; DeepSpeed and transformers count each rank's."""
    count, ranks = values.convert(text, int), around.job.layout.data_ranks
    if count != 1 and (ranks != 1 or around.job.layout.auto):
        raise ValueError(
            f"{count} micro-batches of all ranks (nanoGPT, wordplay) or of each (DeepSpeed, transformers)? Set "
            f"layout.accumulation, which counts each data rank's (here {ranks} data ranks), or train.global_batch"
        )
    return {"layout.accumulation": str(count)}


def _accumulation_of_all(text: str, around: _Around) -> dict[str, str]:
    """Wordplay's optimizer.gradient_accumulation_steps: 1 means one per rank, more are divided by the ranks."""
    count, ranks = values.convert(text, int), around.job.layout.data_ranks
    if around.job.layout.auto and count != 1:
        raise ValueError("counts all data ranks, whose number the planner chooses; set train.global_batch instead")
    if count != 1 and (count < ranks or count % ranks):
        raise ValueError(
            f"{count} micro-batches of all ranks / data ranks {ranks} is not an integer; nearest legal: "
            f"{max(1, round(count / ranks)) * ranks}, or set layout.accumulation, which counts each data rank's"
        )
    return {"layout.accumulation": str(count if count == 1 else count // ranks)}


def _batch_size(text: str, around: _Around) -> dict[str, str]:
    """Sequences in one forward pass of a data rank; the global batch follows, unless the command line sets it."""
    found = {"layout.micro_batch": text}
    if "train.global_batch" not in around.given and not around.job.layout.auto:
        found["train.global_batch"] = "0"
    return found


def _min_lr(text: str, around: _Around) -> dict[str, str]:
    least, lr = values.convert(text, float), around.job.optimizer.lr
    if not 0 <= least <= lr:
        raise ValueError(f"must lie between 0 and optimizer.lr {lr:g}, is {least:g}")
    return {"optimizer.min_lr_ratio": f"{least / lr:.12g}"}


def _beta1(text: str, around: _Around) -> dict[str, str]:
    return {"optimizer.betas": f"{text},{around.job.optimizer.betas[1]}"}


def _beta2(text: str, around: _Around) -> dict[str, str]:
    return {"optimizer.betas": f"{around.job.optimizer.betas[0]},{text}"}


def _feed_forward(_: str, around: _Around) -> dict[str, str]:
    """The hidden width of Llama's reference code (model.py, FeedForward): 2/3 of 4 d_model, times the multiplier,
    rounded up to a multiple. Ezpz rounds to multiples of 360 by default."""
    width = 2 * 4 * around.job.model.d_model // 3
    if multiplier := around.derived.get("ffn_dim_multiplier"):
        width = int(values.convert(multiplier, float) * width)
    multiple = values.convert(around.derived.get("multiple_of", "360"), int)
    if multiple < 1 or width < 1:
        raise ValueError("must be positive")
    return {"model.d_ff": str(-(-width // multiple) * multiple)}


def _loss(text: str, around: _Around) -> dict[str, str]:
    if text == "eager":
        return {"layout.loss_chunk": "0"}
    if text in ("chunked", "chunked-backward"):
        return {"layout.loss_chunk": str(around.job.layout.loss_chunk or 1024)}  # ezpz's default chunk
    raise ValueError(
        f"expected eager or chunked, found {text!r}: with tp the loss is always computed on shards of the vocabulary, "
        "train.compile compiles the loss, too, and there is no other fused one; nearest legal: chunked"
    )


RULES: dict[str, Callable[[str, _Around], dict[str, str]]] = {
    "backend": _backend,  # first: the next ones count its data ranks
    "gradient_accumulation_steps": _accumulation,
    "optimizer.gradient_accumulation_steps": _accumulation_of_all,
    "batch_size": _batch_size,
    "min_lr": _min_lr,
    "beta1": _beta1,
    "beta2": _beta2,
    "ffn_dim_multiplier": _feed_forward,
    "multiple_of": _feed_forward,
    "loss_impl": _loss,
}
"""The rules by name, in the order in which they apply: fields and texts of values from the value that was given."""
