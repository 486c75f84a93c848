"""The chat templates that trl ships: the text of transformers' own rendering, or refused (docs/guides/fine-tuning.md).

trl is no dependency: its package is looked for, or PHALANX_TRL names the folder of its templates."""

from __future__ import annotations

import importlib.util
import os
import re
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import pytest

from phalanx.data.template import ChatTemplate, Renderer

_PACKAGE = importlib.util.find_spec("trl")
_INSTALLED = Path(_PACKAGE.origin).parent / "chat_templates" if _PACKAGE and _PACKAGE.origin else ""
FOLDER = Path(os.environ.get("PHALANX_TRL") or _INSTALLED)
FILES = sorted(FOLDER.glob("*.jinja")) if FOLDER.name else []
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
REFUSED = ("idefics3", "smolvlm", "llava_next")
"""They write contents as lists of parts."""
NO_STOP = ("glm4moe",)
"""Nothing follows an answer but the next turn."""
ONE = [{"role": "user", "content": "2+2? <b> é"}, {"role": "assistant", "content": "It is 4."}]
TWO = [*ONE, {"role": "user", "content": "And 3+3?"}, {"role": "assistant", "content": "It is 6."}]
THOUGHT = [{**each, "reasoning_content": "Add."} if each["role"] == "assistant" else each for each in TWO]
pytestmark = pytest.mark.skipif(not FILES, reason="trl is not installed (pip install trl), nor PHALANX_TRL set")


def _undated(text: str) -> str:
    """Returns a text without the day, which is today's in transformers."""
    return re.sub(r"\d{4}-\d\d-\d\d|\d\d \w{3,9} \d{4}", "DAY", text)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_template_of_trl_renders_as_in_transformers(file: Path) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    template = ChatTemplate(file.read_text(), SPECIAL, file.name)
    name = file.stem.removesuffix("_training")
    with Renderer(template) as renderer:
        if name in REFUSED:
            with pytest.raises(ValueError, match="answer|attribute|content"):
                renderer.parts(ONE)
            return
        for chat in (ONE, TWO, THOUGHT):
            parts = renderer.parts(chat)
            [[expected], _] = render_jinja_template([chat], chat_template=template.source, **SPECIAL)
            assert _undated("".join(text for text, _ in parts)) == _undated(expected)
            answers = ["".join(text for text, _ in run) for answer, run in groupby(parts, itemgetter(1)) if answer]
            assert len(answers) == len(chat) // 2
            assert all(f"It is {digit}." in text for digit, text in zip("46", answers, strict=False))
        assert bool(renderer.warning) == (file.stem in NO_STOP)


def test_the_table_names_templates_that_there_are() -> None:
    names = {file.stem.removesuffix("_training") for file in FILES}
    assert {*REFUSED, *NO_STOP} <= names
    assert len(FILES) >= 72
