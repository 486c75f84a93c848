"""Samples of conversations: one each, or several packed into one, with the loss on the answers.

A sample is known from the table of lengths beside each shard: which conversations it holds, and how many of its targets
count. So every rank knows the valid tokens of every step without reading or asking, and the shards depend neither on
the sequence length nor on packing.

Rows of preferences, a chosen and a rejected answer, become two sequences with the loss on their last answer alone. They
are neighbours wherever samples are numbered: sequence 2i is chosen, 2i + 1 rejected, in the shards, in the order of
samples and in every micro-batch. Other forms of such rows are brought to pairs: KTO's labels, and ranked responses.

Rows of prompts are stored as conversations whose last answer is the right one, of which nothing is trained.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.config.corpora import PAIR, has_answers
from phalanx.config.job import IGNORE, Data
from phalanx.data.index import ANSWER, read_table, token_ids
from phalanx.data.loader import MicroBatch, samples_of
from phalanx.data.packing import PackingFacts, RangeData
from phalanx.data.rows import (
    Message,
    Placed,
    Row,
    checked,
    conversation_of,
    messages_of,
    plain,
    require_known,
    role_of,
    rows_of,
    trained,
    with_context,
)
from phalanx.data.template import ANSWERS
from phalanx.data.tokenizer import Tokenizer
from phalanx.errors import DataError


class ConversationData(RangeData):
    """The samples of one split of conversations, as data.packing, too_long, loss_on and document_mask say.

    Raises DataError if the folder is damaged, or if no conversation is left."""

    scored = False
    """Whether the last token is an input, too."""

    def __init__(self, folder: Path, split: str, seq_len: int, data: Data, *, verify: bool = False):
        super().__init__(folder, split, seq_len, verify=verify)
        self.document_mask, self.answers_only = data.document_mask, has_answers(data)
        shards = self.index.splits[split]
        tables = [read_table(folder, self.index, shard) for shard in shards]
        tokens, answers = np.concatenate([np.empty((0, 2), dtype=np.int64), *tables]).T
        starts = np.cumsum(tokens) - tokens
        inputs = tokens if self.scored else tokens - 1
        positions = np.minimum(inputs, seq_len)
        long = np.flatnonzero(inputs > seq_len)
        if data.too_long == "truncate":
            for conversation in long:  # the others are not read before they are needed
                kept = self.read(int(starts[conversation]) + 1, seq_len - self.scored)
                answers[conversation] = np.count_nonzero(kept & ANSWER)
        else:
            answers[long] = 0
        counted = answers if self.answers_only else np.where(answers > 0, positions, 0)
        usable = np.flatnonzero(self._usable(answers))
        if not usable.size:
            raise DataError(
                f"{folder}: none of the {len(tokens):,} conversations of split {split} has an answer within "
                f"model.seq_len {seq_len}: use a longer sequence, "
                f"{'data.too_long=truncate, ' if data.too_long != 'truncate' else ''}more rows, or another "
                "data.val_fraction"
            )
        self._lengths = tokens[usable]
        self.arrange(starts[usable], positions[usable], counted[usable], packs=data.packing)
        self.facts = PackingFacts(
            conversations=len(tokens),
            truncated=int(np.isin(long, usable).sum()),
            dropped=len(tokens) - len(usable),
            **self.sums(),
        )

    def _usable(self, answers: np.ndarray) -> np.ndarray:
        """Returns which conversations (n,) are read, given the tokens of answers that each has: those with any."""
        return answers > 0

    def counts(self, stored: np.ndarray) -> np.ndarray | bool:
        return (stored & ANSWER > 0) | (not self.answers_only)


_PROMPTS = ("prompt", "messages", "conversations", "history")
_LABELS = {"true": True, "false": False, "1": True, "0": False}


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
                require_known(row, (*_PROMPTS, "completion", "label"))
                key = json.dumps([row.get(name) for name in (*_PROMPTS, "system", "tools")], sort_keys=True)
                labelled.setdefault(key, []).append((where, row, _label(row["label"])))
            except ValueError as error:
                yield where, error
        else:
            yield where, row
    for answers in labelled.values():
        yield from _of_labels(answers)


def _label(value: Any) -> bool:
    found = _LABELS.get(str(value).lower()) if isinstance(value, int | str) else None
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


_CONTEXT = ("prompt", "messages", "conversations")


def preference_rows(files: Iterable[Path], data: Data) -> Iterator[Row]:
    """Yields the rows of corpus preferences, two conversations each."""
    return rows_of(files, data, lambda record: tuple(pair_of(record)), only_last=True, arrange=pair_rows)


_TURN = re.compile(r"\n\n(Human|Assistant):")


def _told(value: Any) -> Any:
    """Returns the messages of a transcript, a text "\n\nHuman: ...\n\nAssistant: ..." as those of HH-RLHF (Bai et al.
    2022); other values as they are."""
    first, *turns = _TURN.split(f"\n\n{value.lstrip()}") if isinstance(value, str) else (value,)
    if first or turns[:1] != ["Human"] or "Assistant" not in turns[::2]:
        return value
    return [
        {"role": "user" if who == "Human" else ANSWERS, "content": text.strip()}
        for who, text in zip(turns[::2], turns[1::2], strict=True)
    ]


def pair_of(record: dict[str, Any]) -> list[list[Message]]:
    """Returns the chosen and the rejected conversation of a row with `chosen` and `rejected`, each a text, a transcript
    (`_told`) or a list of messages, and what comes before them: `prompt`, a text or messages, or `messages`, or
    `conversations`. Several of these must be the same. Whole conversations in `chosen` and `rejected` need none: one
    that is there must be their beginning, or all of the chosen one. Raises ValueError with everything that is wrong."""
    if missing := [name for name in ("chosen", "rejected") if record.get(name) is None]:
        raise ValueError(
            f"no {' and no '.join(missing)}: expected chosen and rejected, each a text or messages, and prompt or "
            "messages before them unless they are whole conversations; or prompt, completion and label (KTO); or "
            "prompt and responses with scores or ranks"
        )
    require_known(record, (*_CONTEXT, "chosen", "rejected", "history"))
    given = [name for name in _CONTEXT if record.get(name) not in (None, "", [])]
    contexts = {name: [*map(plain, messages_of(record[name], "user"))] for name in given}
    context = with_context(messages_of(record[given[0]], "user") if given else [], record)
    problems, pair, in_answers = [], [], False
    for name in ("chosen", "rejected"):
        answer = messages_of(_told(record[name]), ANSWERS)
        whole = bool(answer) and isinstance(answer[0], dict) and role_of(answer[0]) != ANSWERS
        in_answers |= whole
        try:
            pair.append(checked(answer if whole else [*context, *answer], answered=True))
            if pair[-1][-1]["role"] != ANSWERS:
                problems.append(f"{name}: its last message is no answer")
            elif not trained(pair[-1])[-1]:
                problems.append(f"{name}: its last answer has weight 0, and pairs are compared by their last answers")
            elif len(pair[-1]) == 1:
                problems.append(f"{name}: no prompt: neither in prompt, nor in messages, nor before the answer")
        except ValueError as error:
            problems.append(f"{name}: {error}")
    if not problems and in_answers:
        problems += [
            f"{name} is neither the beginning of the chosen conversation nor all of it: leave it out with "
            f"data.ignore_keys=[{name}]"
            for name, before in contexts.items()
            if not _begins(pair[0], before)
        ]
    elif any(contexts[name] != contexts[given[0]] for name in given):
        problems.append(
            f"{' and '.join(given)} stand beside each other and differ: leave one out with data.ignore_keys"
        )
    if not problems and pair[0] == pair[1]:
        problems.append("chosen and rejected are the same")
    elif not problems:
        both = enumerate(zip(*pair, strict=False), start=1)
        number, first = next(((n, each) for n, each in both if each[0] != each[1]), (0, ()))
        if any(message["role"] != ANSWERS for message in first):
            problems.append(
                f"chosen and rejected differ at message {number}, which is no answer: a pair has one prompt"
            )
    if problems:
        raise ValueError("; ".join(problems))
    return pair


def prompt_rows(files: Iterable[Path], data: Data) -> Iterator[Row]:
    """Yields the rows of corpus prompts, one conversation each: `prompt`, a text or messages, or `messages`, then what
    `answer` is as a text, JSON unless it is one."""
    return rows_of(files, data, lambda record: (conversation_of(_answered(record)),), only_last=True)


def _answered(record: dict[str, Any]) -> dict[str, Any]:
    """Returns a row with the answer where rows of corpus chat have it. Raises ValueError without prompt or answer."""
    given = [name for name in ("prompt", "messages") if record.get(name) is not None]
    asked = given[0] if given else ""
    if len(given) > 1 and messages_of(record["prompt"], "user") != record["messages"]:
        raise ValueError("prompt and messages stand beside each other and differ: leave one out with data.ignore_keys")
    if missing := [*([] if asked else ["prompt"]), *(["answer"] if record.get("answer") is None else [])]:
        raise ValueError(
            f"no {' and no '.join(missing)}: expected prompt (a text or messages) and answer; data.columns names "
            "others, such as [question:prompt]"
        )
    answer = record["answer"]
    try:
        text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise ValueError(f"answer is {answer}, or holds such a number: a missing value is null in JSON") from None
    said = [*messages_of(record[asked], "user"), {"role": ANSWERS, "content": text}]
    return {name: value for name, value in record.items() if name not in ("prompt", "answer")} | {"messages": said}


class PromptData(ConversationData):
    """The prompts of one split, with their answers."""

    def prompt(self, sample: int) -> tuple[list[int], str]:
        """Returns the tokens of a prompt, and its answer."""
        stored = self.read(int(self._starts[sample]), int(self._lengths[sample]))  # one each
        answer, tokens = (stored & ANSWER) > 0, token_ids(stored, self.index).astype(np.int64)
        self._require_in_vocabulary(int(tokens.max()))
        right = without_end(self.tokenizer, tokens[answer].tolist())
        return tokens[: int(answer.argmax())].tolist(), self.tokenizer.decode(right)


def ends_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the tokens that end an answer: those of the tokenizer, or, of one without, what separates documents."""
    return tokenizer.end_ids or tokenizer.separator[-1:]


def without_end(tokenizer: Tokenizer, tokens: list[int]) -> list[int]:
    """Returns the tokens of an answer without the last one if that ends it."""
    return tokens[:-1] if tokens and tokens[-1] in ends_of(tokenizer) else tokens


def _begins(conversation: list[Message], before: list[Any]) -> bool:
    """Returns whether a conversation begins with messages, with or without its system message, whatever else these
    have."""
    told, asked = (
        [(each.get("role"), each.get("content")) if isinstance(each, dict) else (None, each) for each in some]
        for some in (conversation, before)
    )
    spoken = [each for each in told if each[0] not in ("system", "developer")]
    return asked in (told[: len(asked)], spoken[: len(asked)])


class PreferenceData(ConversationData):
    """The pairs of one split: sample 2i is the chosen sequence of pair i, 2i + 1 the rejected one. A pair is left out
    if one of its sequences is (data.too_long)."""

    group = PAIR
    reference: np.ndarray | None = None
    """What `refer` gave (train/evaluate.py)."""

    def valid_tokens(self, first: int, count: int, seed: int) -> int:
        """Returns the number of pairs: the loss is their mean."""
        return count // PAIR

    def counted_tokens(self, first: int, count: int, seed: int) -> int:
        return super().valid_tokens(first, count, seed)

    def refer(self, values: np.ndarray) -> None:
        self.reference = values

    def micro_batch(self, ids: np.ndarray, numbers: np.ndarray) -> MicroBatch:
        reference = np.zeros(len(ids)) if self.reference is None else self.reference[ids]
        return replace(super().micro_batch(ids, numbers), reference=reference)

    def _usable(self, answers: np.ndarray) -> np.ndarray:
        return np.repeat((answers > 0).reshape(-1, PAIR).all(axis=1), PAIR)

    def order_of(self, numbers: np.ndarray, seed: int) -> np.ndarray:
        """Returns the samples of these global sample numbers: pairs are permuted, and numbers 2n and 2n + 1 are one."""
        return PAIR * samples_of(numbers // PAIR, self.sample_count // PAIR, seed) + numbers % PAIR

    def spread(self, ids: np.ndarray, samples: int) -> np.ndarray:
        """Returns pairs that are spaced evenly over the split: (n,) int64."""
        return PAIR * (ids // PAIR * (self.sample_count // PAIR) // (samples // PAIR)) + ids % PAIR


class ScoredPairs(PreferenceData):
    """The pairs of one split for a reward model: all tokens are inputs, and the last one, where a sequence has its
    score, has 0 as its target."""

    scored = True

    def inputs_and_targets(self, first: int, positions: int) -> tuple[np.ndarray, np.ndarray]:
        targets = np.full(positions, IGNORE, dtype=np.int64)
        targets[-1] = 0
        return token_ids(self.read(first, positions), self.index).astype(np.int64), targets
