"""The tables of corpora, tokenizers and built-in chat templates: what `data.corpus`, `data.tokenizer` and
`data.template` may name. Their code is in data/.

Templates are Jinja, like a tokenizer's, so that one renderer serves all of them and an exported model can carry them.
What stands in a `generation` block is an answer's: the text that the model learns to write, with what ends it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Literal

from phalanx.bounded import read_json
from phalanx.config.job import Data, MixSource
from phalanx.config.values import yaml_data
from phalanx.facts import Lazy, stated
from phalanx.nearest import did_you_mean
from phalanx.registry import Registry, package_code

OWN_TEMPLATE = "tokenizer"
"""The value of `data.template` that means the template beside the tokenizer."""


@dataclass(frozen=True)
class BuiltInTemplate:
    """A chat template of this project."""

    jinja: str
    title: str
    """One-line description."""
    source: str
    """Where its form comes from."""


BUILT_IN: Mapping[str, BuiltInTemplate] = {
    name: BuiltInTemplate(**stored | {"jinja": "".join(stored["jinja"].splitlines())})
    for name, stored in yaml_data(__file__, "templates.yaml").items()
}
"""Built-in templates by name."""


MIX_ROUND = 1 << 18
"""Samples of a mixture over which its weights hold exactly, to one part in this many."""

Rules = Callable[[Data], Iterable[tuple[str, str]]]
"""Yields the problems of a job's data: the field by its dotted path ("data.path"), and the message."""


_SOURCES = {"mix": ("text",), "chat": ("chat", "text")} | {name: (name,) for name in ("preferences", "prompts")}
"""The corpora that a source of data.mix may be of, by data.corpus; the first unless it says one."""
_ONE_LOSS = "pairs are compared by DPO, other tokens are predicted, and a run has one loss"


def mixture_of(mix: Iterable[MixSource]) -> str:
    """Returns the corpus of a mixture whose job names none: that of its sources which are no text."""
    return next((source.corpus for source in mix if source.corpus not in ("", "text")), "mix")


def corpus_of(source: MixSource, data: Data) -> str:
    """Returns the corpus of a source of data.mix."""
    return source.corpus or _SOURCES[data.corpus][0]


def no_rules(data: Data) -> Iterable[tuple[str, str]]:
    """Yields nothing: the fields' own ranges suffice."""
    return ()


@stated
@dataclass(frozen=True)
class CorpusEntry:
    """A corpus: a text or conversations, which a tokenizer makes tokens of, or tokens without a text."""

    title: str
    """One-line description."""
    source: str
    """Where it comes from."""
    files: Lazy | None = None
    """`files(data) -> list[Path]`: the files that the text is read from, in reading order; None: it is computed. Raises
    DataError if they are not there."""
    documents: Lazy = "phalanx.data.corpus:documents"
    """`documents(files, data)` yields each document of the text as a series of texts, the same ones in every call. By
    default a file is a document, or one per line if it is JSONL."""
    tokens: Lazy | None = None
    """Instead of a text: `tokens(data, split, start, size)` returns the token ids start to start + size of a split
    ("train", "val"): (size,) integers below `vocab`."""
    count: int | str = 0
    """Number of tokens, or the field of `data` that states it; only with `tokens`."""
    vocab: int | str = 0
    """Vocabulary size, or the field of `data` that states it; only with `tokens`."""
    rows: Lazy | None = None
    """Instead of a text: `rows(files, data)` yields each row of a data set of conversations, as a
    `phalanx.data.rows.Row`, the same ones in every call."""
    row_size: int = 1
    """Conversations per row: 2 if rows are pairs of a chosen and a rejected one."""
    settings: tuple[str, ...] = ()
    """The fields of `data` that the corpus depends on, besides those that hold for all (val_fraction, limit_mb)."""
    only_location: tuple[str, ...] = ()
    """Those of `settings` that say where the text is, but not which: shards do not depend on them."""
    identity: Lazy | None = None
    """`identity(data)` returns what else determines the text, as JSON-able values by name: shards are made for each."""
    describe: Lazy | None = None
    """`describe(data)` returns the description of the corpus as configured; None: it is the title."""
    verified: bool = False
    """Whether `files` verifies that the text is the one that the name stands for, so that it cannot have changed."""
    rules: Rules = no_rules
    """The problems of the settings."""
    also_called: tuple[str, ...] = ()
    """Other names, as lower-case letters and digits."""


def _path_problems(data: Data) -> Iterator[tuple[str, str]]:
    if not data.path:
        yield "data.path", "corpus text needs the path of a text or JSONL file, or a folder of them"


def _mix_problems(data: Data) -> Iterator[tuple[str, str]]:
    if not data.mix:
        yield "data.mix", "corpus mix needs sources, such as [{path: books, weight: 3}, {path: code.jsonl, weight: 1}]"
    yield from _source_problems(data)


def _source_problems(data: Data) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with the sources of a mixture."""
    if data.path and data.mix:
        yield "data.path", "stands beside data.mix, whose sources have their own paths; leave one of the two out"
    smallest = sum(source.weight for source in data.mix) / MIX_ROUND
    first: dict[str, int] = {}
    for number, source in enumerate(data.mix, start=1):
        if not source.path or "\0" in source.path:
            yield (
                "data.mix",
                f"item {number}: path is {source.path!r}: expected a text or JSONL file, or a folder of them",
            )
        elif corpus_of(source, data) not in _SOURCES[data.corpus]:
            yield (
                "data.mix",
                f"item {number} ({source.path}): corpus {source.corpus} is no source of data.corpus={data.corpus} "
                f"(known: {', '.join(_SOURCES[data.corpus])}): {_ONE_LOSS}",
            )
        elif (before := first.setdefault(os.path.normpath(source.path), number)) != number:
            yield "data.mix", f"item {number}: {source.path} is item {before}, too; add their weights"
        if corpus_of(source, data) == "text":
            for name in ("columns", "ignore_keys"):
                if getattr(source, name):
                    yield "data.mix", f"item {number} ({source.path}): {name} is for conversations, and this is text"
        if 0 < source.weight < smallest:
            yield (
                "data.mix",
                f"item {number}: weight {source.weight:g} is less than 1/{MIX_ROUND:,} of all weights; leave it out, "
                f"or give at least {smallest:.2g}",
            )


def _chat_problems(data: Data) -> Iterator[tuple[str, str]]:
    if not data.path and not data.mix:
        yield "data.path", f"corpus {data.corpus} needs the path of a JSONL file, or of a folder of them, or data.mix"
    yield from _source_problems(data)
    names = (OWN_TEMPLATE, *BUILT_IN)
    if data.template not in names and not data.template.endswith((".jinja", ".j2")):
        hint = did_you_mean(data.template, names)
        yield (
            "data.template",
            f"no template {data.template!r}{hint} (known: {', '.join(names)}; your own: a .jinja file)",
        )
    columns = {f"item {number}: columns: ": each.columns for number, each in enumerate(data.mix, start=1)}
    for where, pair in [("", pair) for pair in data.columns] + [(at, pair) for at in columns for pair in columns[at]]:
        if not all(pair.partition(":")[::2]):
            yield (
                "data.mix" if where else "data.columns",
                f"{where}expected THEIRS:OURS, such as [question:prompt,answer:completion], found {pair!r}",
            )


def _prompt_problems(data: Data) -> Iterator[tuple[str, str]]:
    if data.mix:
        yield "data.mix", "prompts have one source; nearest legal: data.path"
    yield from _alone_problems(data, "a prompt and its answer are one sample")


def _preference_problems(data: Data) -> Iterator[tuple[str, str]]:
    yield from _alone_problems(data, "pairs are compared by their answers, one sequence each")


def _alone_problems(data: Data, why: str) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with conversations that are samples of their own."""
    yield from _chat_problems(data)
    for name, value, legal in (("packing", data.packing, False), ("loss_on", data.loss_on, "answers")):
        if value != legal:
            yield f"data.{name}", f"{why}; nearest legal: {name}={legal}"


def setting_problems(settings: Iterable[str], *stated: object) -> Iterator[str]:
    """Yields names, in `settings` or among the `stated` facts, that are no fields of `data`."""
    known = {field.name for field in fields(Data)}
    for name in [*settings, *(each for each in stated if isinstance(each, str))]:
        if name not in known:
            yield f"data has no field {name!r} (fields: {', '.join(sorted(known))})"


def rules_problems(rules: Rules) -> Iterator[str]:
    """Yields why rules are none: they must yield pairs of texts for any job's data."""
    with package_code("rules failed for the default data"):
        found = list(rules(Data()))
    if not all(isinstance(pair, tuple) and list(map(type, pair)) == [str, str] for pair in found):
        yield f"rules must yield pairs of a field's path and a message, yielded {found!r}"


def _entry_problems(name: str, entry: CorpusEntry) -> Iterator[str]:
    """Yields the problems of an entry that is added."""
    yield from setting_problems(entry.settings, entry.count, entry.vocab)
    computed = entry.documents != CorpusEntry.documents
    drawn = "mix" in entry.settings  # its sources have the texts
    if entry.tokens is None and entry.files is None and entry.rows is None and not computed and not drawn:
        yield "states too little; missing: files, documents, rows, or tokens"
    if entry.tokens is not None and (entry.files is not None or computed):
        yield "tokens stand instead of a text: leave out files and documents"
    if entry.rows is not None and (entry.tokens is not None or computed):
        yield "rows stand instead of a text or tokens: leave out documents and tokens"
    for fact in ("count", "vocab"):
        value = getattr(entry, fact)
        if entry.tokens is not None and (value == "" or (isinstance(value, int) and value < 1)):
            yield f"{fact} is missing: a corpus of tokens states it"
        elif entry.tokens is None and value:
            yield f"{fact} is for a corpus of tokens; the tokenizer states a text's"
    if extra := [each for each in entry.only_location if each not in entry.settings]:
        yield f"only_location {', '.join(extra)} is not among settings"
    names = {other: known for known, each in CORPORA.items() for other in (known, *each.also_called)}
    yield from (f"{other!r} already means {names[other]}" for other in entry.also_called if other in names)
    yield from rules_problems(entry.rules)  # last: it raises where their code fails


CORPORA = Registry(
    "corpus",
    {
        "stdlib": CorpusEntry(
            "the text of this Python's own library, nothing to download",
            "the standard library's .py files, without its tests",
            files="phalanx.data.corpus:stdlib_files",
            describe="phalanx.data.corpus:stdlib_description",
            identity="phalanx.data.corpus:stdlib_identity",
        ),
        "shakespeare_char": CorpusEntry(
            "tiny Shakespeare",
            "karpathy/char-rnn, data/tinyshakespeare",
            files="phalanx.data.corpus:shakespeare_files",
            settings=("path",),
            only_location=("path",),
            verified=True,
            also_called=("shakespeare", "tinyshakespeare", "shakespearechar"),
        ),
        "text": CorpusEntry(
            "your own text or JSONL files: set data.path",
            "data.path",
            files="phalanx.data.corpus:text_files",
            describe="phalanx.data.corpus:text_description",
            settings=("path", "text_field"),
            rules=_path_problems,
        ),
        "mix": CorpusEntry(
            "several sources of text, drawn by weight: set data.mix",
            "data.mix",
            settings=("mix", "text_field"),
            only_location=("mix",),
            rules=_mix_problems,
        ),
        "chat": CorpusEntry(
            "your own conversations in JSONL files, for fine-tuning: set data.path",
            "data.path",
            files="phalanx.data.rows:row_files",
            rows="phalanx.data.rows:chat_rows",
            describe="phalanx.data.corpus:text_description",
            identity="phalanx.data.template:template_identity",
            settings=("path", "mix", "template", "columns", "ignore_keys"),
            only_location=("mix",),
            rules=_chat_problems,
        ),
        "preferences": CorpusEntry(
            "your own pairs of a chosen and a rejected answer in JSONL files: set data.path",
            "data.path",
            files="phalanx.data.rows:row_files",
            rows="phalanx.data.conversations:preference_rows",
            row_size=2,
            describe="phalanx.data.corpus:text_description",
            identity="phalanx.data.template:template_identity",
            settings=("path", "mix", "template", "columns", "ignore_keys"),
            only_location=("mix",),
            rules=_preference_problems,
        ),
        "prompts": CorpusEntry(
            "your own prompts with answers in JSONL files, for GRPO: set data.path",
            "data.path",
            files="phalanx.data.rows:row_files",
            rows="phalanx.data.conversations:prompt_rows",
            describe="phalanx.data.corpus:text_description",
            identity="phalanx.data.template:template_identity",
            settings=("path", "template", "columns", "ignore_keys"),
            rules=_prompt_problems,
        ),
        "random": CorpusEntry(
            "random tokens",
            "a generator with a fixed seed, for measuring",
            tokens="phalanx.data.corpus:random_tokens",
            count="random_tokens",
            vocab="random_vocab",
            settings=("random_tokens", "random_vocab"),
        ),
    },
    _entry_problems,
)
"""Corpora by name."""


PAIR = 2
"""Sequences of a pair: the chosen one, then the rejected one."""


def has_pairs(data: Data) -> bool:
    """Returns whether a job's data are pairs of a chosen and a rejected answer: its loss compares them (DPO)."""
    return data.corpus in CORPORA and CORPORA[data.corpus].row_size == PAIR


def has_prompts(data: Data) -> bool:
    """Returns whether a job's data are prompts, whose completions it generates and rewards (GRPO)."""
    return data.corpus == "prompts"


def has_conversations(data: Data) -> bool:
    """Returns whether a job's samples are conversations, of which routers count each for itself."""
    return data.corpus in CORPORA and CORPORA[data.corpus].rows is not None


Compared = Literal["", "pairs", "completions"]


def compared_in(data: Data) -> Compared:
    """Returns what the loss of a job's data compares; empty if it only predicts tokens."""
    return "pairs" if has_pairs(data) else "completions" if has_prompts(data) else ""


def number_of(stated: int | str, data: Data) -> int:
    """Returns a number that an entry states itself or through a field of `data`."""
    return getattr(data, stated) if isinstance(stated, str) else stated


def has_answers(data: Data) -> bool:
    """Returns whether only some tokens count in the loss: those of answers."""
    return CORPORA[data.corpus].rows is not None and data.loss_on == "answers"


MIN_BPE_VOCAB = 257
"""The 256 bytes and the end-of-text token."""
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>")
"""End-of-document tokens of known tokenizers, in order of preference."""
TEMPLATE_FILES = JINJA_FILE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
"""The files beside a tokenizer.json."""
TOKENIZER_FILES = ("tokenizer.json", "tekken.json", "tokenizer.model", "*.tiktoken", "tiktoken.model")
"""Patterns of the files in a folder that may hold its tokenizer, the first that is there first."""
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|return|>")
"""Tokens with which chat models end an answer: ChatML, Llama 3, Gemma, Phi, gpt-oss."""


@stated
@dataclass(frozen=True)
class TokenizerEntry:
    """A kind of tokenizer."""

    title: str
    """One-line description."""
    source: str
    """Where the method comes from."""
    make: Lazy
    """`make(data, counts, texts)` returns the `Tokenizer` for a corpus: `counts[c]` is how often code point c occurs in
    it, (0x110000,) int64, and `texts()` yields its training text from the beginning."""
    read: Lazy | None
    """`read(stored)` returns the tokenizer of a tokenizer.json of this kind, a dict that anybody may have written:
    raises ValueError if it is not one. None: it is stored in the format of the `tokenizers` library."""
    vocab: int | str = 0
    """Vocabulary size, or the field of `data` that states it; 0: it depends on the corpus."""
    settings: tuple[str, ...] = ()
    """The fields of `data` that it depends on."""
    rules: Rules = no_rules
    """The problems of the settings."""


def _bpe_problems(data: Data) -> Iterator[tuple[str, str]]:
    if data.bpe_vocab < MIN_BPE_VOCAB:
        yield (
            "data.bpe_vocab",
            f"must be at least {MIN_BPE_VOCAB} (the 256 bytes and the end of text), is {data.bpe_vocab}",
        )


def _tokenizer_problems(name: str, entry: TokenizerEntry) -> Iterator[str]:
    """Yields the problems of an entry that is added."""
    yield from setting_problems(entry.settings, entry.vocab)
    if isinstance(entry.vocab, int) and entry.vocab < 0:
        yield f"vocab must not be negative, is {entry.vocab}"
    if name == "number":
        yield "the name stands for tokens without text"
    yield from rules_problems(entry.rules)  # last: it raises where their code fails


TOKENIZERS = Registry(
    "tokenizer",
    {
        "char": TokenizerEntry(
            "one token per character of the corpus",
            "nanoGPT, data/shakespeare_char",
            make="phalanx.data.tokenizer:make_char",
            read="phalanx.data.tokenizer:read_char",
        ),
        "byte": TokenizerEntry(
            "the 256 bytes of UTF-8",
            "ByT5 (Xue et al. 2021)",
            make="phalanx.data.tokenizer:make_byte",
            read="phalanx.data.tokenizer:read_byte",
            vocab=256,
        ),
        "bpe": TokenizerEntry(
            "byte-level BPE, trained on the corpus",
            "GPT-2 (Radford et al. 2019), section 2.2",
            make="phalanx.data.tokenizer:make_bpe",
            read=None,
            vocab="bpe_vocab",
            settings=("bpe_vocab",),
            rules=_bpe_problems,
        ),
    },
    _tokenizer_problems,
)
"""Tokenizers by name."""


def tokenizer_in(folder: Path) -> Path | None:
    """Returns the file of a folder that holds its tokenizer; None without one."""
    found = (path for pattern in TOKENIZER_FILES for path in sorted(folder.glob(pattern)) if os.path.isfile(path))
    return next(found, None)


def vocabulary_of(data: Data) -> int:
    """Returns the vocabulary size that the settings of `data` or its tokenizer.json state; 0 if only reading the corpus
    tells."""
    corpus = CORPORA[data.corpus]
    if corpus.tokens is not None:
        return number_of(corpus.vocab, data)
    if data.tokenizer in TOKENIZERS:
        return number_of(TOKENIZERS[data.tokenizer].vocab, data)
    return tokens_at(Path(data.tokenizer).expanduser())


def tokens_at(path: Path) -> int:
    """Returns the vocabulary size of a tokenizer.json, or of that of a folder; 0 for what is none, and for files of
    other programs, which take seconds to read. Only reading it for training says what is wrong with it."""
    file = (tokenizer_in(path) or path) if os.path.isdir(path) else path
    try:
        stat = os.stat(file)
        return _tokens_in(file, stat.st_mtime_ns, stat.st_size) if file.suffix == ".json" else 0
    except (OSError, ValueError):  # the latter: a NUL byte in its name, or no JSON
        return 0


@lru_cache(maxsize=16)
def _tokens_in(file: Path, mtime_ns: int, size: int) -> int:
    match read_json(file):
        case {"kind": "number", "vocab_size": int(tokens)}:
            return tokens
        case {"kind": "char", "characters": str(characters), "unknown": unknown}:
            return len(characters) + bool(unknown)
        case {"kind": str(kind)} if kind in TOKENIZERS and isinstance(vocab := TOKENIZERS[kind].vocab, int):
            return vocab
        case {"model": {"vocab": dict() as ids}, **rest}:
            last = max((id for id in ids.values() if isinstance(id, int)), default=-1)
        case {"model": {"vocab": list() as pieces}, **rest}:
            last = len(pieces) - 1
        case _:
            return 0
    added = rest.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        match token:
            case {"id": int(id)}:
                last = max(last, id)
    return last + 1
