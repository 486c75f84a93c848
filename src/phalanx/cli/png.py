"""Pictures as PNG, for slides: drawn by cairosvg or a browser, whichever is installed."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from phalanx.errors import RunError
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
        import cairosvg  # pyright: ignore[reportMissingImports]

        cairosvg.svg2png(svg.encode(), write_to=path, scale=SCALE, background_color=ground)
        return
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise RunError(f"{path}: a PNG needs cairosvg (pip install cairosvg) or chromium; write an .svg instead")
    width, height = re.search(r"width='(\d+)' height='(\d+)'", svg).groups()  # pyright: ignore[reportOptionalMemberAccess]
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
