"""Lays out the pages of the documentation site in dist/docs: those of docs/, and a copy of every file outside it that
a page links to, such as results of benchmarks and job files. `make docs` then builds the site from there.

    python docs/stage_site.py
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
STAGE = ROOT / "dist" / "docs"
COPIES = "repository"
"""Folder of the site with files from outside docs/."""
_LINK = re.compile(r"(\]\()([^)#\s]+)")
_PICTURE = re.compile(r"^(!\[[^\]]*\]\(([^)]+)\))$", flags=re.MULTILINE)
_CODE = {".yaml": "yaml", ".py": "python", ".sh": "bash"}
"""Endings of files that become a page with their code."""


def stage() -> None:
    """Writes dist/docs anew."""
    shutil.rmtree(STAGE, ignore_errors=True)
    shutil.copytree(DOCS, STAGE, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    waiting, seen = sorted(DOCS.rglob("*.md")), set()
    while waiting:
        page = waiting.pop()
        if page in seen:
            continue
        seen.add(page)
        text = page.read_text(encoding="utf-8")
        goal = place(page)
        goal.parent.mkdir(parents=True, exist_ok=True)
        goal.write_text(led(text, page), encoding="utf-8")
        for target in linked(text, page):
            if target.suffix == ".md":
                waiting.append(target)
            elif not target.is_relative_to(DOCS):
                copy(target)


def linked(text: str, page: Path) -> list[Path]:
    """Returns the files of the repository that the text of a page links to."""
    targets = [(page.parent / link).resolve() for _, link in _LINK.findall(text) if "://" not in link]
    return [target for target in targets if target.is_file() and target.is_relative_to(ROOT)]


def led(text: str, page: Path) -> str:
    """Returns a page's text with links to the places that files have in the site, and pictures that open larger."""

    def new(found: re.Match[str]) -> str:
        target = (page.parent / found[2]).resolve()
        if "://" in found[2] or not target.is_file() or not target.is_relative_to(ROOT):
            return found[0]
        return found[1] + Path(os.path.relpath(place(target), place(page).parent)).as_posix()

    return _PICTURE.sub(r"[\1](\2)", _LINK.sub(new, text))


def place(file: Path) -> Path:
    """Returns where a file of the repository lies in the stage."""
    if file.is_relative_to(DOCS) and file.suffix not in _CODE:
        return STAGE / file.relative_to(DOCS)
    goal = STAGE / COPIES / file.relative_to(ROOT)
    return goal.with_name(f"{goal.name}.md") if file.suffix in _CODE else goal


def copy(file: Path) -> None:
    """Copies a file from outside docs/; code becomes a page."""
    goal = place(file)
    goal.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix not in _CODE:
        shutil.copyfile(file, goal)
        return
    code = file.read_text(encoding="utf-8")
    name = file.relative_to(ROOT).as_posix()
    goal.write_text(f"# {name}\n\n````{_CODE[file.suffix]}\n{code}````\n", encoding="utf-8")


if __name__ == "__main__":
    stage()
