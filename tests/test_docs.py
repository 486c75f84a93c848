"""The documents: what they name exists, and the README is written in short sentences."""

import re
from pathlib import Path

import pytest

import phalanx
from phalanx.cli.main import VERBS

ROOT = Path(phalanx.__file__).parents[2]
README = ROOT / "README.md"
LAUNCHERS = sorted((ROOT / "docs" / "guides" / "launchers").glob("*.md"))
FAMILIES = sorted((ROOT / "docs" / "reference" / "families").glob("*.md"))
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("src", "tests", "docs", "examples", "benchmarks")
FILES = [f"/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
MOST_WORDS = 30

pytestmark = pytest.mark.skipif(not README.exists(), reason="the package is installed without its documents")


def prose(page: Path) -> list[str]:
    """Returns the sentences of a page, without code blocks, tables, pictures and headings."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not line.startswith(("    ", "\t", "|", "#", "!["))]
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:- |\d+\. ))", "\n".join(lines))
    plain = [re.sub(r"\]\([^)]*\)", "]", " ".join(block.split())) for block in blocks]
    return [sentence for block in plain for sentence in re.split(r"(?<=[.!?])\*{0,2} ", block) if sentence]


def test_the_readme_has_short_sentences():
    assert not [sentence for sentence in prose(README) if len(sentence.split()) > MOST_WORDS]


def test_the_readme_opens_with_what_it_does_in_bullets():
    opening = README.read_text(encoding="utf-8").split("\n## ")[0]
    assert len(re.findall(r"^- ", opening, flags=re.MULTILINE)) >= 5


def test_the_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


def test_the_overview_of_launching_links_every_launcher():
    text = (ROOT / "docs" / "guides" / "launch.md").read_text(encoding="utf-8")
    assert LAUNCHERS
    assert not [page.name for page in LAUNCHERS if f"(launchers/{page.name})" not in text]


def test_the_overview_of_families_links_every_family():
    text = (ROOT / "docs" / "reference" / "families.md").read_text(encoding="utf-8")
    assert FAMILIES
    assert not [page.name for page in FAMILIES if f"(families/{page.name})" not in text]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_modules_links_and_verbs_exist(page):
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w./-]+\.py)`", text))
    modules = {name.replace(".", "/") for name in re.findall(r"python -m ((?:phalanx|benchmarks)\.[\w.]+)", text)}
    packages = {path for path in modules if (ROOT / "src" / path).is_dir() or (ROOT / path).is_dir()}
    named |= {f"{module}.py" for module in modules - packages}
    assert not {name for name in named if not any(path.endswith(f"/{name}") for path in FILES)}
    links = {link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link}
    assert not {link for link in links if not (page.parent / link).exists()}
    verbs = set(re.findall(r"(?:\$ |`|^\s+|&& )phalanx ([a-z]+(?:-[a-z]+)?)", text, flags=re.MULTILINE))
    assert verbs <= set(VERBS)


@pytest.mark.parametrize("page", ["explanation/architecture.md", "reference/glossary.md"])
def test_every_room_is_named(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    rooms = {path.parent.name for path in (ROOT / "src" / "phalanx").glob("*/__init__.py")}
    assert not {room for room in rooms if f"`{room}`" not in text and f"`{room}/`" not in text}


def test_the_map_lists_the_rooms_in_the_order_of_imports():
    """The architecture page and the layering test state the same order."""
    from test_imports import FLOORS

    text = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    assert " > ".join(FLOORS) in " ".join(text.split())


def test_every_glossary_term_has_one_meaning():
    text = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8").split("## Also called")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    terms = {row[0]: row[1] for row in rows if row[0] != "term" and not row[0].startswith("-")}
    assert len(terms) >= 80
    assert not [term for term, meaning in terms.items() if not meaning.endswith(".")]
    assert len(terms) == sum(row[0] != "term" and not row[0].startswith("-") for row in rows)
