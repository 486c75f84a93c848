"""The plan's page: well-formed, whole in itself, and nothing of a job runs in it. One test opens it in a browser."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from phalanx.check.load import load_words
from phalanx.config import overrides
from phalanx.config.layout import Layout
from phalanx.pictures.elements import STYLE
from phalanx.pictures.page import CSS
from phalanx.pictures.plan_page import command, html, job_section
from phalanx.plan.plan import Plan, SpacePoint
from plan.plans import hopeless, plan

SECTIONS = ["chosen", "best", "parts", "why", "instead", "timeline", "space", "rejected"]
TIMELINE = "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 9 9' width='9' height='9'><title>t</title></svg>"
VOID = {"meta", "wbr", "br"}
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --enable-logging=stderr --v=0 --virtual-time-budget=2000 --dump-dom"
)


class Balanced(HTMLParser):
    """Counts elements, gathers attributes, and fails where tags do not match."""

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.seen: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.attributes if key == name]


def test_it_is_well_formed_and_has_every_section() -> None:
    found = Balanced(html(plan(), TIMELINE))
    ids = found.values("id")
    assert ids == SECTIONS
    assert found.seen["svg"] == 4
    assert len(re.findall("<tr", html(plan()))) > len(plan().best) + len(plan().alternatives)
    assert Balanced(html(hopeless())).values("id") == ["chosen", "parts", "space", "rejected"]
    nothing = replace(hopeless(), nearest=None, points=(), rejected={})
    assert Balanced(html(nothing)).values("id") == ["chosen"]


def test_it_loads_nothing() -> None:
    page = html(plan(), TIMELINE)
    found = Balanced(page)
    assert not found.values("src")
    assert not found.values("href")
    assert not {"link", "img", "iframe", "object"} & set(found.seen)
    assert "url(" not in page
    assert "@import" not in page
    assert set(re.findall(r"https?://[^'\" ]*", page)) == {"http://www.w3.org/2000/svg"}
    policy = next(value for name, value in found.attributes if name == "content" and "default-src" in value)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    assert found.seen["script"] == 1
    assert set(re.findall(r"<style>.*?</style>", page, flags=re.DOTALL)) == {f"<style>{CSS}</style>", STYLE}


def poisoned(bad: str) -> Plan:
    """A plan in which every text that comes from outside is `bad`."""
    spec = plan().best[0].spec
    accelerator = replace(spec.cluster.accelerator, name=bad)
    spec = replace(
        spec,
        model=replace(spec.model, preset=bad),
        cluster=replace(spec.cluster, preset=bad, accelerator=accelerator),
        layout=replace(spec.layout, schedule=bad),
    )
    first = replace(plan().best[0], spec=spec)
    alternatives = tuple(each._replace(name=bad, why=bad) for each in plan().alternatives)
    points = (*plan().points, SpacePoint(bad, 12.0, 2.0**36, True, bad))
    return replace(
        plan(),
        request=spec,
        best=(first, *plan().best[1:]),
        alternatives=alternatives,
        points=points,
        rejected={bad: 3},
        notes=(bad,),
    )


@pytest.mark.parametrize("bad", ["<script>alert(1)</script>", "'\"><img src=x onerror='alert(1)'>", "--></style>&lt;b"])
def test_what_comes_from_outside_is_text(bad: str) -> None:
    good, found = Balanced(html(plan(), TIMELINE)), Balanced(html(poisoned(bad), TIMELINE))
    assert bad not in html(poisoned(bad))
    assert set(found.seen) == set(good.seen)
    assert found.seen["script"] == 1
    assert {name for name, _ in found.attributes} == {name for name, _ in good.attributes}


def test_a_large_space_is_not_a_large_page() -> None:
    many = tuple(
        point._replace(seconds=point.seconds * (1 + number / 100), family=f"family {number % 11}")
        for number in range(40)
        for point in plan().points
    )
    page = html(replace(plan(), points=many[:1000], best=plan().best * 4), TIMELINE)
    assert len(page.encode()) < 1_500_000
    assert "others" in page


def test_the_layout_can_be_pasted() -> None:
    for layout in (each.layout for each in plan().best):
        assert Layout(**yaml.safe_load(job_section(layout))["layout"]) == layout
        words = shlex.split(command(layout))
        assert words[:3] == ["phalanx", "train", "JOB"]
        job = load_words(overrides.parse(["model=llama3-70b", "cluster=dgx-h100:8", *words[3:]])).job
        assert job.layout == layout
    odd = command(Layout(schedule="my schedule's.yaml", pp=2))
    assert shlex.split(odd)[3:] == ["pp=2", "layout.schedule=my schedule's.yaml"]


@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH")
def test_a_browser_shows_it_and_sorts_its_table(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    click = (
        "const head = [...document.querySelectorAll('#best th')].find(head => head.textContent === 'memory');"
        "head.click(); document.documentElement.dataset.order ="
        "[...document.querySelectorAll('#best tbody tr')].map(row => row.cells[0].textContent).join();"
    )
    page.write_text(html(plan(), TIMELINE).replace("</body>", f"<script>{click}</script></body>"), encoding="utf-8")
    assert BROWSER
    words = [BROWSER, *QUIET.split(), f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "Uncaught" not in done.stderr
    assert "Content Security Policy" not in done.stderr
    opened = re.search("<html[^>]*>", done.stdout)
    assert opened, done.stdout[:2000]
    assert "data-ready" in opened[0]
    peaks = [each.prediction.fullest.peak for each in plan().best]
    order = ",".join(str(rank + 1) for rank in sorted(range(len(peaks)), key=lambda rank: peaks[rank]))
    assert f'data-order="{order}"' in opened[0]
    assert re.findall('<section id="(\\w+)"', done.stdout) == SECTIONS
