"""The documentation site: its navigation, gallery and course name everything that there is."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import phalanx
from phalanx.cli.main import VERBS

ROOT = Path(phalanx.__file__).parents[2]
DOCS = ROOT / "docs"
LECTURES = sorted((ROOT / "examples" / "course").glob("*.sh"))

pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="the package is installed without its documents")


def pages(entry) -> list[str]:
    """Returns the pages of a part of the navigation."""
    if isinstance(entry, str):
        return [entry]
    return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in pages(part)]


def test_every_page_is_in_the_navigation_once():
    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert sorted(listed) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def test_every_picture_is_in_the_gallery_with_a_caption():
    shown = re.findall(
        r"!\[([^\]]+)\]\(\.\./(pictures/[^)]+)\)", (DOCS / "reference" / "gallery.md").read_text(encoding="utf-8")
    )
    assert sorted(path for _, path in shown) == sorted(f"pictures/{path.name}" for path in DOCS.glob("pictures/*"))


def test_every_lecture_is_in_the_course():
    text = (DOCS / "tutorials" / "course.md").read_text(encoding="utf-8")
    assert LECTURES
    assert not [path.name for path in LECTURES if f"(../../examples/course/{path.name})" not in text]


@pytest.mark.parametrize("lecture", LECTURES, ids=lambda path: path.stem)
def test_a_lecture_calls_verbs_and_files_that_exist(lecture):
    text = lecture.read_text(encoding="utf-8")
    assert set(re.findall(r"^phalanx ([a-z-]+)", text, flags=re.MULTILINE)) <= set(VERBS)
    assert not [path for path in re.findall(r"examples/[\w.]+", text) if not (ROOT / path).exists()]
    subprocess.run(["bash", "-n", lecture], check=True)


def test_pages_outside_docs_are_staged_with_their_links(tmp_path, monkeypatch):
    """A page's links to results and job files lead to copies, and those of the copies to pages."""
    monkeypatch.syspath_prepend(str(DOCS))
    import stage_site

    monkeypatch.setattr(stage_site, "STAGE", tmp_path)
    stage_site.stage()
    del sys.modules["stage_site"]
    broken = []
    for page in tmp_path.rglob("*.md"):
        links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
        broken += [(page.name, link) for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not broken
    assert (tmp_path / "repository" / "examples" / "main.yaml.md").exists()
