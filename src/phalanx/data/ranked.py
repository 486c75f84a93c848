"""Preference rows in other forms, as rows of a chosen and a rejected answer: KTO's labels, and ranked responses."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.data.row_fields import require_known
from phalanx.data.rows import Placed

_CONTEXT = ("prompt", "messages", "conversations", "history")
_LABELS = {True: True, False: False, "true": True, "false": False, "1": True, "0": False}


def pair_rows(rows: Iterator[Placed]) -> Iterator[Placed]:
    """Yields rows of pairs as they are, and those made of others: every two responses of different rank, and, after all
    others, the answers of each prompt that have a `label` (Ethayarajh et al. 2024, KTO)."""
    labelled: dict[str, list[tuple[str, dict[str, Any], bool]]] = {}
    for where, row in rows:
        if isinstance(row, ValueError):
            yield where, row
            continue
        named = {name for name, value in row.items() if value is not None}  # tables have every column in every row
        if named & {"chosen", "rejected"}:
            yield where, row
        elif "responses" in named:
            yield from _of_responses(where, row)
        elif {"completion", "label"} <= named:
            try:
                require_known(row, (*_CONTEXT, "completion", "label"))
                key = json.dumps([row.get(name) for name in (*_CONTEXT, "system", "tools")], sort_keys=True)
                labelled.setdefault(key, []).append((where, row, _label(row["label"])))
            except ValueError as error:
                yield where, error
        else:
            yield where, row
    for answers in labelled.values():
        yield from _of_labels(answers)


def _label(value: Any) -> bool:
    found = _LABELS.get(value.lower() if isinstance(value, str) else value) if isinstance(value, int | str) else None
    if found is None:
        raise ValueError(f"label is {value!r}: expected true or false")
    return found


def _of_labels(answers: Sequence[tuple[str, dict[str, Any], bool]]) -> Iterator[Placed]:
    """Yields the pairs of one prompt's answers: each in one at least, the fewer ones several times."""
    good, bad = ([(where, row) for where, row, label in answers if label is wanted] for wanted in (True, False))
    if not good or not bad:
        for where, _, label in answers:
            yield (
                where,
                ValueError(
                    f"its prompt has only answers with label {str(label).lower()}: a pair needs one of each, and KTO's "
                    "loss of single answers is not implemented; leave it out, or train on answers with label true "
                    "(data.corpus=chat)"
                ),
            )
        return
    for number in range(max(len(good), len(bad))):
        (where, chosen), (other, rejected) = good[number % len(good)], bad[number % len(bad)]
        context = {name: value for name, value in chosen.items() if name not in ("completion", "label")}
        pair = {"chosen": chosen["completion"], "rejected": rejected["completion"]}
        yield f"{where} over {other}", {**context, **pair}


def _of_responses(where: str, row: dict[str, Any]) -> Iterator[Placed]:
    """Yields every two `responses` of which one has a higher score, or a lower rank (InstructGPT: Ouyang et al. 2022,
    section 3.5)."""
    responses, order = row["responses"], [name for name in ("scores", "ranks") if name in row]
    values = row[order[0]] if order else None
    if not isinstance(responses, list) or len(order) != 1 or not isinstance(values, list):
        yield (
            where,
            ValueError("responses need one list beside them: scores (higher is better) or ranks (1 is the best)"),
        )
        return
    if len(values) != len(responses) or not all(
        type(value) in (int, float) and math.isfinite(value) for value in values
    ):
        yield where, ValueError(f"{order[0]} must be {len(responses)} numbers, one for each of the responses")
        return
    worth = values if order[0] == "scores" else [-value for value in values]
    context = {name: value for name, value in row.items() if name not in ("responses", "scores", "ranks")}
    pairs = [(a, b) for a in range(len(worth)) for b in range(len(worth)) if worth[a] > worth[b]]
    if not pairs:
        yield where, ValueError(f"no two of its {len(responses)} responses differ in {order[0]}: there is no pair")
    for a, b in pairs:
        place = f"{where} (response {a + 1} over {b + 1})"
        yield place, {**context, "chosen": responses[a], "rejected": responses[b]}
