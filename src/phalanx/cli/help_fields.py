"""The help pages of a job's sections and fields, with the values that a job has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from phalanx.check.load import LoadedJob
from phalanx.cli.columns import filled
from phalanx.cli.page import flag_of, value_name
from phalanx.config import reference
from phalanx.config.fields import get, resolve, sections
from phalanx.config.reference import MEASURED, FieldReference
from phalanx.nearest import did_you_mean


def section_names() -> list[str]:
    """Returns the names of all sections, outer ones before those inside of them."""
    return [*dict.fromkeys([*(each.partition(".")[0] for each in sections()), *sections()])]


def outer_sections() -> list[str]:
    """Returns the names of the sections that lie in no other."""
    return [name for name in section_names() if "." not in name]


def problems_of(words: Sequence[str], options: Sequence[str]) -> Iterator[str]:
    """Yields a message about every word after --help that is no section and no field. `options` are other names that
    could be meant."""
    known = [*section_names(), *options, *(field.short for field in reference.fields().values())]
    for word in words:
        if word not in section_names() and resolve(word) is None:
            yield (
                f"--help {word}: no section or field of this name{did_you_mean(word, known)}; sections: "
                f"{', '.join(outer_sections())}"
            )


def explained(name: str, loaded: LoadedJob, width: int) -> Iterator[str]:
    """Yields the lines about a section with those inside of it, or about one field."""
    if name not in section_names():
        yield from _field(reference.fields()[resolve(name) or name], loaded, width)
        return
    for section, text in reference.section_texts().items():
        if f"{section}.".startswith(f"{name}.") and not section.startswith(MEASURED):
            if section != name:
                yield ""
            yield from (section, *filled(text, width), "")
            for field in reference.fields().values():
                if field.section == section:
                    yield from _field(field, loaded, width)


def _field(field: FieldReference, loaded: LoadedJob, width: int) -> Iterator[str]:
    flag = flag_of(field.path)
    if field.kind is bool:
        section, _, last = field.path.rpartition(".")
        flag = f"{flag}, {flag_of(f'{section}.no_{last}')}"
    else:
        flag = f"{flag} {value_name(field.kind)}"
    value, origin = get(loaded.job, field.path), loaded.origins.get(field.path, "default")
    now = f"default {reference.shown(field.default)}"
    if origin != "default":
        now = f"{reference.shown(value)} ({origin}); {now}"
    limits = "; ".join(words for each in field.ranges if (words := each.words))
    facts = "; ".join(part for part in (limits, now) if part)
    yield from filled(flag, width, indent=2)
    yield from filled(f"{field.about} [{facts}]", width, indent=6)
