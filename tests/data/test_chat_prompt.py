"""Prompts of a fine-tuned run: what its conversations begin with, token for token."""

import json
from pathlib import Path

import pytest

from phalanx.config.job import Data
from phalanx.data.prepare import prepare
from phalanx.data.template import ChatPrompts, ChatTemplate
from phalanx.data.tokenizer import ByteTokenizer, Tokenizer

ASKED = {"role": "user", "content": "What is 2+2?"}


def prompts(folder: Path, template: str) -> tuple[Path, ChatPrompts]:
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": ASKED["content"], "completion": "4"}) + "\n")
    out, path = str(folder / "out"), str(folder / "rows.jsonl")
    prepared = prepare(Data(corpus="chat", path=path, template=template, tokenizer="byte", val_fraction=0, dir=out))
    found = ChatPrompts.of_run(prepared, Tokenizer.load(prepared))
    assert found is not None
    return prepared, found


@pytest.mark.parametrize(
    ("template", "end"), [("chatml", "<|im_end|>"), ("llama3", "<|eot_id|>"), ("alpaca", "\n"), ("raw", "\n")]
)
def test_the_prompt_is_the_beginning_of_the_training_text(tmp_path: Path, template: str, end: str) -> None:
    prepared, chat = prompts(tmp_path, template)
    assert chat.end == end
    stored = (prepared / "train-00000.bin").read_bytes()
    text = bytes(stored[n] for n in range(0, len(stored), 4)).decode()
    prompt = bytes(chat([ASKED])).decode()
    assert text.startswith(prompt + "4" + end)
    assert not stored[4 * len(prompt) - 1] >> 7  # the last token of the prompt
    assert stored[4 * len(prompt) + 3] >> 7  # the first of the answer


def test_without_a_template_there_are_no_prompts_and_refusals_are_passed_on(tmp_path: Path) -> None:
    assert ChatPrompts.of_run(tmp_path, ByteTokenizer()) is None
    refusing = ChatTemplate("{{ raise_exception('no') }}", {}, "refusing", trusted=True)
    with pytest.raises(ValueError, match="TemplateError: no"):
        ChatPrompts(refusing, ByteTokenizer())([ASKED])
