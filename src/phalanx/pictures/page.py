"""The frame of every page: one self-contained HTML document that loads nothing, can be read without scripts, and
follows the reader's light or dark preference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from phalanx.pictures.page_style import CSS, SCRIPT

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


def table(
    heads: Sequence[str], rows: Iterable[Sequence[tuple[str, float | None]]], words: Iterable[int] = ()
) -> Iterator[str]:
    """Yields a table whose columns can be sorted. A cell is a text and the number that it is sorted by, if that is not
    the text; columns `words` hold text."""
    left = set(words)
    yield "<div class='scroll'><table class='sorts'><thead><tr>"
    yield from (f"<th data-sort{_words(at in left)}>{escape(head)}</th>" for at, head in enumerate(heads))
    yield "</tr></thead><tbody>"
    for row in rows:
        cells = [f"<td{_words(at in left)}{_key(key)}>{escape(text)}</td>" for at, (text, key) in enumerate(row)]
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"


def _words(wanted: bool) -> str:
    return " class='words'" if wanted else ""


def _key(value: float | None) -> str:
    return "" if value is None else f" data-value='{value:.9g}'"
