"""lm-eval's harness: a thin adapter between its requests and a run (lm_eval.api.model.LM, version 0.4)."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from phalanx.errors import JobError
from phalanx.evaluate.requests import Prompt, RequestScorer
from phalanx.nearest import did_you_mean

BOOTSTRAPS = 100
"""Resamplings for the errors of metrics that have no formula for them."""
MOST_NEW_TOKENS = 256
"""Tokens of a generated answer, unless the task says how many."""


def require_harness() -> None:
    """Raises JobError, with what to install, if lm-eval is not there."""
    if find_spec("lm_eval") is None:
        raise JobError('--tasks needs lm-eval, not installed here: pip install "phalanx[lm-eval]"')


def adapter(scorer: RequestScorer) -> Any:
    """Returns a model of lm-eval."""
    base: Any = import_module("lm_eval.api.model").LM

    class PhalanxLM(base):
        """Answers lm-eval's three kinds of requests; a request's `args` hold its texts."""

        def __init__(self) -> None:
            super().__init__()
            self.scorer = scorer

        def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            found = self.scorer.likelihoods([request.args for request in requests])
            return [(each.value, each.greedy) for each in found]

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            return self.scorer.rolling([request.args[0] for request in requests])

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            return self.scorer.continuations([_prompt(*request.args) for request in requests])

        @property
        def tokenizer_name(self) -> str:
            return f"phalanx-{scorer.tokenizer.fingerprint}"

        def chat_template(self, chat_template: bool | str = False) -> str:
            return scorer.chat.template.source if scorer.chat else ""

        def apply_chat_template(
            self, chat_history: Sequence[dict[str, Any]], add_generation_prompt: bool = True
        ) -> str:
            assert scorer.chat is not None, "run_tasks asks for templates only with --chat"
            if not add_generation_prompt:
                raise JobError("--chat: a task with a gen_prefix begins answers itself, which templates here cannot")
            try:
                return scorer.chat.text(chat_history)
            except ValueError as error:
                raise JobError(f"the chat template: {error}") from error

    return PhalanxLM()


def _prompt(text: str, options: dict[str, Any]) -> Prompt:
    """Returns a prompt with a task's generation_kwargs."""
    until = options.get("until") or []
    stops = [until] if isinstance(until, str) else list(until)
    temperature = float(options.get("temperature") or 0.0) if options.get("do_sample") else 0.0
    return Prompt(text, stops, int(options.get("max_gen_toks") or MOST_NEW_TOKENS), temperature)


def run_tasks(
    scorer: RequestScorer,
    tasks: Sequence[str],
    *,
    include_path: Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Returns the metrics of each task by name. Raises JobError if lm-eval knows none of these names."""
    harness = import_module("lm_eval")
    manager = import_module("lm_eval.tasks").TaskManager(include_path=str(include_path) if include_path else None)
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        own = "(your own: --include-path FOLDER with its YAML file)"
        raise JobError([f"lm-eval has no task {task}{did_you_mean(task, manager.all_tasks)} {own}" for task in unknown])
    found = harness.simple_evaluate(
        model=adapter(scorer),
        tasks=list(tasks),
        task_manager=manager,
        num_fewshot=num_fewshot,
        limit=limit,
        apply_chat_template=scorer.chat is not None,
        bootstrap_iters=BOOTSTRAPS,
    )
    return {task: _numbers(metrics) for task, metrics in found["results"].items()}


def _numbers(metrics: dict[str, Any]) -> dict[str, Any]:
    """Returns a task's metrics, without names, and without errors that are not available."""
    return {name: value for name, value in metrics.items() if isinstance(value, int | float) and name != "sample_len"}
