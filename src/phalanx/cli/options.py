"""Verbs whose options are a dataclass: their commands, reading them, and running them on the ranks of another
launcher."""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from phalanx.cli.commands import WHOLE, Command, CommandVerb
from phalanx.cli.option import Option
from phalanx.config.reference import texts_below
from phalanx.config.run import RunOptions
from phalanx.errors import JobError
from phalanx.launch.lifeline import die_with_launcher
from phalanx.launch.meet.detected import detected
from phalanx.launch.ranks import LOG_DIR, Ranks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed.Store, to the type stubs

Options = TypeVar("Options")


def command_of(kind: type[Any]) -> Command:
    """Returns the command whose options are the fields of a dataclass, each explained by the text below it.

    The first field, without a default, is the command's argument; several of a tuple. A field of type bool is a switch;
    one that is a dataclass stands for its own fields. Its type may be annotated with more about the option:
    `Annotated[Path, {"value": "FILE"}]`.
    """
    subject, *others = [*_fields(kind)]
    options = {
        field.name: Option(field.kind, field.default, field.text, many=field.is_tuple, **field.facts)
        for field in others
        if field.kind is not bool
    }
    switches = {field.name: field.text for field in others if field.kind is bool}
    return Command((subject.name.removesuffix("s").upper(),), options, switches=switches, more=subject.is_tuple)


def read_options(kind: type[Options], verb: CommandVerb, argv: Sequence[str]) -> tuple[Options, list[str]]:
    """Returns the options of a verb as its dataclass, with the defaults where a word is wrong, and every problem of the
    words. Raises JobError with them if the verb's argument is missing."""
    words, problems = verb.read(argv)
    if not verb.commands[WHOLE].takes(len(words.subjects)):
        raise JobError(problems)
    subject = next(_fields(kind))
    given = {**words.options, **dict.fromkeys(words.switches, True)}
    given[subject.name] = words.subjects if subject.is_tuple else words.subject
    return _made(kind, given), problems


def run_on_ranks(
    read: Callable[[Ranks | None], Options],
    start: Callable[[Options], int],
    work: Callable[[Options, Ranks, Store | None], int],
) -> int:
    """Runs a verb that may have several ranks, and returns its exit code.

    Args:
        read: gets this process's place, None without a launcher; returns the options, or raises JobError, also if they
            need another number of processes than were started.
        start: runs the verb where no launcher has started this process.
        work: does the work of a rank, with the store of all if another launcher has started it.
    """
    die_with_launcher()
    ranks = detected(os.environ)
    if ranks is None:
        return start(read(None))
    if LOG_DIR in os.environ:  # `start` in another process has started this one
        return work(read(ranks), ranks, None)
    return as_foreign_rank(ranks, partial(read, ranks), work)


def as_foreign_rank(
    ranks: Ranks,
    read: Callable[[], Options | None],
    work: Callable[[Options, Ranks, Store | None], int],
    timeout_s: Callable[[Options], float] = lambda _: RunOptions().timeout_s,
) -> int:
    """Works as one of the processes that torchrun, srun or mpiexec started, and returns the exit code. They meet, for
    at most `timeout_s`, as soon as each has read its options: a mistake of several is one message. `read` returns None
    if there is nothing to do."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or every lost peer prints the stack of torch's C++
    from phalanx.launch.meet.meeting import Meeting
    from phalanx.launch.verdict import lost_peer_named

    meeting = Meeting(ranks)
    with meeting.agreed():
        options = read()
        if options is None:
            return 0
        ranks = meeting.join(timeout_s(options))
        with lost_peer_named(ranks):
            return work(options, ranks, meeting.store)


@dataclass(frozen=True)
class _OptionField:
    """One field of a dataclass of options."""

    name: str
    text: str
    kind: Any
    """The type of one value; paths are text until they are read, and None is no value."""
    is_path: bool
    is_tuple: bool
    default: Any
    facts: dict[str, Any]


def _fields(kind: type[Any]) -> Iterator[_OptionField]:
    texts, hints = texts_below(kind), typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint, facts = hints[field.name], {}
        if typing.get_origin(hint) is typing.Annotated:
            hint, facts = typing.get_args(hint)
        if dataclasses.is_dataclass(hint):
            yield from _fields(typing.cast(type, hint))
            continue
        is_tuple = typing.get_origin(hint) is tuple
        if is_tuple or type(None) in typing.get_args(hint):
            hint = typing.get_args(hint)[0]
        is_path = hint is Path
        one = str if is_path else hint
        yield _OptionField(field.name, texts[field.name], one, is_path, is_tuple, field.default, facts)


def _made(kind: type[Any], given: Mapping[str, Any]) -> Any:
    """Returns the dataclass with the given values."""
    values: dict[str, Any] = {}
    for field in _fields(kind):
        if field.name in given:
            value = given[field.name]
            if field.is_path:
                value = tuple(map(Path, value)) if field.is_tuple else Path(value)
            values[field.name] = value
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            inner = typing.cast(type, hint)
            values[name] = inner(**{each.name: values.pop(each.name) for each in _fields(inner) if each.name in values})
    return kind(**values)
