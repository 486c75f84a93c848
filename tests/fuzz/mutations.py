"""Mutations of a valid file: of its bytes, of its words and, for JSON, of its values. The same number gives the same
mutation, on any machine."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

WORDS = [
    *b"null true NaN Infinity -Infinity 1e400 -1e400 -0 -1 0 1e-400 0x10 0.1 4294967296 9223372036854775808 ~".split(),
    *b"[] {} '' , : # &a *a <<: !!str %s%n =cmd() ${HOME} ../../x /dev/zero ../ \"\" \" ' \\ | > @ `".split(),
    *(b'"\\ud800"', b'"\\udfff\\ud800"', b'"\\u0000"', b"\xed\xa0\x80", b"\xe2\x80\xae", b"\xf4\x8f\xbf\xbf"),
    *(b"\x00", b"\xff", b"\xef\xbb\xbf", b"\x1b[31m", b"\r", b"\n", b"\t", b"\n---\n", b"\n...\n", b"%YAML 9.9\n"),
    *(b"9" * 30, b"9" * 5000, b"a" * 3000, b"[" * 2000, b"{" * 300, b'{"a":' * 2000, b"- " * 300, b"? " * 300),
    *(b"&a [*a]", b"!!python/object/apply:os.system [id]"),
]
"""What is put into a file, or in place of a part of it."""

NUMBERS = b"0 1 2 3 5 7 8 16 63 64 100 1000 1024 4096 65536 1000000 2147483647 4294967296 -1 0.5 1e9 1e-9".split()

VALUES = [
    *("null", "true", "false", "0", "-1", "1", "-0.0", "0.5", "1e308", "2147483648", "9223372036854775808", "NaN"),
    *('""', '"x"', '"\\u0000"', '"\\ud800"', '"../x"', '"/"', '"\\u001b]0;x\\u0007"', '"\\u202e"', '"NaN"', '"step"'),
    *(
        "Infinity",
        "9" * 40,
        f'"{"a" * 3000}"',
        f'"{"9" * 5000}"',
        "[]",
        "{}",
        "[[]]",
        '{"": {}}',
        json.dumps([0] * 300),
    ),
    *("[" * levels + "]" * levels for levels in (70, 700)),
    '{"a":' * 100 + "0" + "}" * 100,
    json.dumps({str(number): number for number in range(300)}),
]
"""JSON values that are put in place of another one."""


def mutated(sample: bytes, name: str, number: int) -> bytes:
    """Returns the mutation of this number: one to four changes of a valid file, or of the values of a line in it if
    that is JSON."""
    chance = random.Random(f"{name} {number}")
    content = sample
    if chance.random() < 0.6:
        before, line, after = _a_line(sample, chance)
        if (values := _parsed(line)) is not None:
            for _ in range(chance.choice((1, 1, 1, 2, 4))):
                values = _with_another_value(values, chance)
            return before + _written(values, chance) + after
    for _ in range(chance.choice((1, 1, 2, 4))):
        content = chance.choice(CHANGES)(content, chance)
    return content


def _flip(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content or b" ")
    for _ in range(chance.choice((1, 3, 30))):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _truncate(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content) + 1)]


def _insert(content: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(content) + 1)
    return content[:place] + chance.choice(WORDS) + content[place:]


def _replace(content: bytes, chance: random.Random) -> bytes:
    begin, end = sorted(chance.randrange(len(content) + 1) for _ in range(2))
    return content[:begin] + chance.choice(WORDS) + content[min(end, begin + 40) :]


def _replace_a_word(content: bytes, chance: random.Random) -> bytes:
    """Replaces what stands after a separator up to the next one: a value, in most formats."""
    places = [place for place, byte in enumerate(content) if byte in b":,=\n"]
    if not places:
        return _insert(content, chance)
    begin = chance.choice(places) + 1
    end = next((place for place in places if place > begin), len(content))
    return content[:begin] + b" " * chance.randrange(2) + chance.choice(WORDS) + content[end:]


def _repeat(content: bytes, chance: random.Random) -> bytes:
    """Repeats a part: a line, a key, a row."""
    lines = content.splitlines(keepends=True) or [b"\n"]
    place = chance.randrange(len(lines))
    return b"".join([*lines[:place], lines[place] * chance.choice((2, 50)), *lines[place + 1 :]])


def _remove(content: bytes, chance: random.Random) -> bytes:
    begin, end = sorted(chance.randrange(len(content) + 1) for _ in range(2))
    return content[:begin] + content[end:]


def _swap(content: bytes, chance: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    chance.shuffle(lines)
    return b"".join(lines)


def _other_number(content: bytes, chance: random.Random) -> bytes:
    """Replaces a number by another one, so that what follows the reading is reached."""
    places = list(re.finditer(rb"[0-9]+", content))
    if not places:
        return _insert(content, chance)
    place = chance.choice(places)
    return content[: place.start()] + chance.choice(NUMBERS) + content[place.end() :]


def _other_word(content: bytes, chance: random.Random) -> bytes:
    """Replaces a word by another one of the same file."""
    places = list(re.finditer(rb"[A-Za-z_]{2,}", content))
    if not places:
        return _insert(content, chance)
    place, other = chance.choice(places), chance.choice(places)
    return content[: place.start()] + other[0] + content[place.end() :]


CHANGES = [
    *(_flip, _truncate, _insert, _replace, _replace_a_word, _replace_a_word, _repeat, _remove, _swap),
    *(_other_number, _other_number, _other_number, _other_word),
]


def _a_line(content: bytes, chance: random.Random) -> tuple[bytes, bytes, bytes]:
    """Returns what stands before one line, the line, and what follows; a file of one JSON value is one line."""
    lines = [content] if _parsed(content) is not None else content.splitlines(keepends=True)
    place = chance.randrange(len(lines))
    return b"".join(lines[:place]), lines[place], b"".join(lines[place + 1 :])


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


def _written(values: Any, chance: random.Random) -> bytes:
    """Returns JSON text, now and then with names that are repeated."""
    text = json.dumps(values, ensure_ascii=chance.random() < 0.7)
    if isinstance(values, dict) and values and chance.random() < 0.1:
        text = f"{text[:-1]}, {json.dumps(chance.choice(list(values)))}: {chance.choice(VALUES)}}}"
    return text.encode(errors="surrogatepass")


def _with_another_value(values: Any, chance: random.Random) -> Any:
    """Returns the values with one replaced, removed, renamed, moved or repeated, at any depth."""
    places = list(_places(values, 20))
    if not places or chance.random() < 0.02:
        return json.loads(chance.choice(VALUES))
    holder, key = chance.choice(places)
    match chance.randrange(8):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[chance.choice(("", "x", "\ud800", "a" * 300, f"{key} "))] = holder.pop(key)
        case 2:
            other, place = chance.choice(places)
            holder[key] = json.loads(json.dumps(other[place]))
        case 3 if isinstance(holder, list):
            holder.extend(json.loads(json.dumps(holder[key])) for _ in range(20))
        case _:
            holder[key] = json.loads(chance.choice(VALUES))
    return values


def _places(value: Any, levels: int) -> Iterator[tuple[Any, Any]]:
    """Yields every list or object with each of its keys, down to some levels."""
    if levels and isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield value, key
            yield from _places(inner, levels - 1)
