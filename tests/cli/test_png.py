"""Pictures as PNG: by a browser where one is installed, otherwise a message."""

import shutil

import pytest

from phalanx.cli import files as png
from phalanx.cli.files import write
from phalanx.cli.main import main
from phalanx.errors import RunError
from phalanx.pictures.elements import TEXT, TEXT_ON_DARK, document, for_ground


@pytest.mark.skipif(not any(map(shutil.which, png.BROWSERS)), reason="no chromium")
def test_a_name_in_png_draws_the_picture(tmp_path):
    write(str(tmp_path / "a.png"), document("a", 120, 40, []))
    head = (tmp_path / "a.png").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(head[16:20]), int.from_bytes(head[20:24])) == (120 * png.SCALE, 40 * png.SCALE)


def test_without_a_program_the_message_says_what_helps(tmp_path, monkeypatch):
    monkeypatch.setattr(png, "BROWSERS", ())
    monkeypatch.setattr(png.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(RunError, match=r"a PNG needs cairosvg .* or chromium; write an .svg instead"):
        write(str(tmp_path / "a.png"), document("a", 120, 40, []))


def test_a_dark_picture_has_a_dark_ground_and_pale_text(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("phalanx.cli.files.write_png", lambda _, svg, dark: drawn.append(for_ground(svg, dark)))
    command = ["schedule", "show", "1f1b", "--svg", str(tmp_path / "a.png")]
    assert main(command) == main([*command, "--dark"]) == 0
    for svg, ink, other in ((drawn[0], TEXT, TEXT_ON_DARK), (drawn[1], TEXT_ON_DARK, TEXT)):
        assert ink in svg
        assert other not in svg
        assert "prefers-color-scheme" not in svg


def test_dark_is_for_a_png(capsys):
    assert main(["schedule", "show", "1f1b", "--svg", "a.svg", "--dark"]) == 2
    assert "--dark is for a PNG, an SVG follows the reader's preference: give --svg a name in .png" in (
        capsys.readouterr().err
    )
