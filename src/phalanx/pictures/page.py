"""The frame of every page: one self-contained HTML document that loads nothing, can be read without scripts, and
follows the reader's light or dark preference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from types import MappingProxyType

# The style sheet and the script of the plan's page. Without the script the page shows the same; with it a click on
# a heading sorts its table.
CSS = """
:root { color-scheme: light dark; --text: #1c2126; --soft: #5c656e; --page: #fff; --card: #f5f6f8; --line: #d9dde2;
  --best: #2f8f57; --bar: #3b76c4; --bad: #b5432f; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e7ea; --soft: #9aa4ae; --page: #14171a; --card: #1e2226;
  --line: #343a41; --best: #4db47b; --bar: #5b93dc; --bad: #e07a66; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem clamp(.8rem, 3vw, 2rem) 3rem; max-width: 1280px; background: var(--page);
  color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
p { margin: .3rem 0; }
.soft { color: var(--soft); }
code, pre { font: 13px/1.5 ui-monospace, monospace; }
.layout code { font-size: 1.05rem; font-weight: 600; overflow-wrap: anywhere; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(135px, 1fr)); gap: .6rem; margin: .8rem 0; }
.figures div { background: var(--card); border-radius: 6px; padding: .5rem .8rem; }
.figures b { display: block; font-size: 1.2rem; }
.figures span { color: var(--soft); font-size: .85rem; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); gap: 1rem; }
.pair > * { min-width: 0; }
pre { margin: .3rem 0; padding: .7rem .9rem; background: var(--card); border-radius: 6px; overflow-x: auto;
  user-select: all; }
pre.wrap { white-space: pre-wrap; overflow-wrap: anywhere; }
figure { margin: 0; padding: .8rem; border: 1px solid var(--line); border-radius: 6px; overflow-x: auto; }
figure svg { display: block; height: auto; fill: var(--text); }
figure.bars svg { width: 100%; min-width: 480px; }
figure.map svg { width: 100%; min-width: 820px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
td { white-space: nowrap; }
th.words, td.words { text-align: left; }
td.words { white-space: normal; overflow-wrap: anywhere; min-width: 11rem; }
tr.first td { font-weight: 600; }
tr.first td:first-child { color: var(--best); }
html[data-ready] th[data-sort] { cursor: pointer; }
th[aria-sort=ascending]::after { content: " ↑"; }
th[aria-sort=descending]::after { content: " ↓"; }
.bar { display: block; height: .65rem; min-width: 2px; border-radius: 2px; background: var(--bar); }
.bar.best { background: var(--best); }
td.track { width: 26%; min-width: 6rem; padding-top: .7rem; }
td.count { width: 5rem; }
.bad { color: var(--bad); }
ul { margin: .3rem 0; padding-left: 1.2rem; }
@media (max-width: 640px) {
  body { font-size: 14px; }
  th, td { padding: .3rem .4rem; }
  .stacks thead { display: none; }
  .stacks tr { display: block; padding: .5rem 0; border-bottom: 1px solid var(--line); }
  .stacks td { display: inline-block; border: 0; padding: 0 1rem 0 0; }
  .stacks td.words, .stacks td.track { display: block; width: 100%; padding: .1rem 0; }
  .stacks td:empty { display: none; }
}
"""

SCRIPT = """
for (const table of document.querySelectorAll("table.sorts")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  const key = (row, at) => {
    const text = row.cells[at].dataset.value ?? row.cells[at].textContent;
    return text !== "" && !isNaN(text) ? Number(text) : text;
  };
  heads.forEach((head, at) => head.dataset.sort !== undefined && head.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...body.rows].sort((a, b) => {
      const x = key(a, at), y = key(b, at);
      return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1);
    });
    body.append(...rows);
  }));
}
document.documentElement.dataset.ready = "";
"""


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
