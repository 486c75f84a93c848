"""Files that a verb writes on request."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.cli.verb import Words, flag_of
from phalanx.echo import echo
from phalanx.errors import JobError, RunError
from phalanx.pictures.elements import DARK_PAGE, PAGE, for_ground

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SCALE = 2
"""Pixels of the PNG per pixel of the picture: sharp on a projector."""
SECONDS = 60


def write_png(path: str, svg: str, dark: bool = False) -> None:
    """Writes an SVG document as PNG, on a white or a dark ground. Raises RunError if nothing here can draw it, or if it
    fails."""
    svg, ground = for_ground(svg, dark), DARK_PAGE if dark else PAGE
    if importlib.util.find_spec("cairosvg"):
        import cairosvg  # pyrefly: ignore[missing-import]

        cairosvg.svg2png(svg.encode(), write_to=path, scale=SCALE, background_color=ground)
        return
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise RunError(f"{path}: a PNG needs cairosvg (pip install cairosvg) or chromium; write an .svg instead")
    width, height = re.search(r"width='(\d+)' height='(\d+)'", svg).groups()  # pyrefly: ignore[missing-attribute]
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "picture.html"
        style = f"margin:0;background:{ground}"
        page.write_text(f"<!doctype html><meta charset='utf-8'><body style='{style}'>{svg}", "utf-8")
        command = [browser, "--headless", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/user"]
        command += ["--no-sandbox"] if os.geteuid() == 0 else []  # which a browser run by root insists on
        command += [f"--force-device-scale-factor={SCALE}", f"--window-size={width},{height}"]
        command += [f"--screenshot={os.path.abspath(path)}", page.as_uri()]
        try:
            done = subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RunError(f"{path} could not be drawn by {browser}: {error}") from None
    if done.returncode or not os.path.exists(path):
        raise RunError(f"{path} could not be drawn by {browser}: exit code {done.returncode}")


DARK = {"dark": "a picture in .png on a dark ground instead of a white one"}
"""The switch of every verb that draws pictures."""


PICTURES = (".svg", ".png")
"""Endings of the files that pictures are written to."""
_DRAWN = ("svg", "failures_svg")
"""Options that take a picture."""


@dataclass(frozen=True)
class OutputFiles:
    """The files that the options of a command line ask for."""

    paths: dict[str, str]
    """By option, with the home directory for ~."""
    dark: bool
    as_json: bool

    @classmethod
    def of(cls, words: Words, *names: str) -> OutputFiles:
        """Returns those of the options `names`. Raises JobError, before any computation, with every file that cannot be
        written, and if --dark is given without a PNG: an SVG follows the reader's preference."""
        paths = {name: os.path.expanduser(words.options[name]) for name in names if words.options[name]}
        drawn = [name for name in names if name in _DRAWN]
        problems = [
            f"--{name} {paths[name]}: a picture is written as {' or '.join(PICTURES)}; name a file that ends so"
            for name in drawn
            if name in paths and Path(paths[name]).suffix not in PICTURES
        ]
        for name, path in paths.items():
            folder = Path(path).parent
            if not os.path.isdir(folder):
                problems.append(f"--{name} {path}: folder {folder} does not exist; create it, or name another")
            elif os.path.isdir(path):
                problems.append(f"--{name} {path} is a folder; name a file in it")
            first = next(each for each, other in paths.items() if os.path.abspath(other) == os.path.abspath(path))
            problems += [f"--{first} and --{name}: both are {path}; name two files"] if first != name else []
        if "dark" in words.switches and not any(paths.get(name, "").endswith(".png") for name in drawn):
            flags = " or ".join(map(flag_of, drawn))
            problems.append(f"--dark is for a PNG, an SVG follows the reader's preference: give {flags} a name in .png")
        if problems:
            raise JobError(problems)
        return cls(paths, "dark" in words.switches, words.as_json)

    def write(self, contents: Mapping[str, Callable[[], str]]) -> None:
        """Writes each file with what the function of its option returns. Raises RunError if that fails."""
        for name, path in self.paths.items():
            write(path, contents[name](), self.dark)

    def tell(self) -> None:
        if self.paths and not self.as_json:
            echo(f"\nwritten: {' and '.join(self.paths.values())}")


def write(path: str, text: str, dark: bool = False) -> None:
    """Writes the file: text as it is, and an SVG document as PNG if the file's name ends so, on a white or a dark
    ground. Raises RunError if that fails."""
    if path.endswith(".png") and text.startswith("<svg"):
        write_png(path, text, dark)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path} could not be written: {error.strerror}") from None
