"""The frame of every page: one self-contained HTML document that loads nothing, can be read without scripts, and
follows the reader's light or dark preference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from types import MappingProxyType

# The style sheet and the script of the plan's page. Without the script the page shows the same; with it a click on
# a heading sorts its table.
CSS, SCRIPT = (f"\n{Path(__file__).with_suffix(end).read_text(encoding='utf-8')}" for end in (".css", ".js"))

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def html_page(title: str, heading: str, subtitle: str, sections: Iterable[str]) -> str:
    """Returns the document. Title, heading and subtitle are text; sections are HTML."""
    return "\n".join(
        [
            "<!doctype html>",
            "<html lang='en'>",
            "<head>",
            "<meta charset='utf-8'>",
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            "<meta name='viewport' content='width=device-width, initial-scale=1'>",
            f"<title>{escape(title)}</title>",
            f"<style>{CSS}</style>",
            "</head>",
            "<body>",
            "<header>",
            f"<h1>{escape(heading)}</h1>",
            f"<p class='soft'>{escape(subtitle)}</p>",
            "</header>",
            "<main>",
            *sections,
            "</main>",
            f"<script>{SCRIPT}</script>",
            "</body>",
            "</html>\n",
        ]
    )


def section(name: str, heading: str, parts: Iterable[str]) -> Iterator[str]:
    """Yields a section with a heading; its parts are HTML."""
    yield f"<section id='{name}'>"
    yield f"<h2>{escape(heading)}</h2>"
    yield from parts
    yield "</section>"


def figure(svg: str, kind: str) -> Iterator[str]:
    """Yields an SVG document as a figure of the class `kind`."""
    yield f"<figure class='{kind}'>{svg}</figure>"


def list_of(sentences: Sequence[str]) -> Iterator[str]:
    """Yields sentences as a list."""
    yield "<ul>"
    yield from (f"<li>{escape(sentence)}</li>" for sentence in sentences)
    yield "</ul>"


def figures(values: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yields the most important figures, each with its label."""
    yield "<div class='figures'>"
    yield from (f"<div><b>{escape(value)}</b><span>{escape(label)}</span></div>" for value, label in values)
    yield "</div>"


class Html(str):
    """Markup: a table does not escape it."""


Cell = tuple[str, float | None]
"""A text, and the number that it is sorted by, if that is not the text."""


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    words: Iterable[int] = (),
    tips: Mapping[str, str] = MappingProxyType({}),
    first: bool = False,
) -> Iterator[str]:
    """Yields a table whose columns can be sorted. Columns `words` hold text, `tips` explain heads, and the `first` row
    may stand out."""
    left = set(words)
    yield "<div class='scroll'><table class='sorts'><thead><tr>"
    for at, head in enumerate(heads):
        tip = f" title='{escape(tips[head])}'" if head in tips else ""
        yield f"<th data-sort{_words(at in left)}{tip}>{escape(head)}</th>"
    yield "</tr></thead><tbody>"
    for number, row in enumerate(rows):
        yield f"<tr{' class=first' if first and not number else ''}>"
        for at, (text, key) in enumerate(row):
            value = "" if key is None else f" data-value='{key:.9g}'"
            yield f"<td{_words(at in left)}{value}>{text if isinstance(text, Html) else escape(text)}</td>"
        yield "</tr>"
    yield "</tbody></table></div>"


def bars(
    rows: Iterable[Sequence[str]], classes: Sequence[str], heads: Sequence[str] = (), first: bool = False
) -> Iterator[str]:
    """Yields a table with bars among its cells, which on a narrow page become lines; the columns have `classes`."""
    columns = [f" class='{name}'" if name else "" for name in classes]
    yield "<div class='scroll'><table class='stacks'>"
    if heads:
        cells = (f"<th{of if 'words' in of else ''}>{head}</th>" for of, head in zip(columns, heads, strict=True))
        yield f"<thead><tr>{''.join(cells)}</tr></thead>"
    yield "<tbody>"
    for number, row in enumerate(rows):
        yield f"<tr{' class=first' if first and not number else ''}>"
        for of, text in zip(columns, row, strict=True):
            yield f"<td{of}>{text if isinstance(text, Html) else escape(text)}</td>"
        yield "</tr>"
    yield "</tbody></table></div>"


def bar(share: float, best: bool = False) -> Html:
    """Returns a bar of which `share` is full."""
    return Html(f"<span class='bar{' best' if best else ''}' style='width:{min(100.0, 100 * share):.1f}%'></span>")


def _words(wanted: bool) -> str:
    return " class='words'" if wanted else ""
