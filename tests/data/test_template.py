"""Chat templates: the texts and tokens of transformers, and nothing that a template can break."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import pytest

from phalanx.config.corpora import BUILT_IN
from phalanx.config.job import Data
from phalanx.data.rows import row_texts
from phalanx.data.template import ChatTemplate, Renderer, TemplateRenderer, find_template, own_template
from phalanx.data.tokenizer import Tokenizer, train_bpe
from phalanx.errors import DataError, JobError

# Chat templates: the texts and tokens of transformers' apply_chat_template, and nothing that a template can break.


SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT = [
    {"role": "system", "content": "You add  numbers.\n"},
    {"role": "user", "content": "2+2? é <b>"},
    {"role": "assistant", "content": " 4 "},
    {"role": "user", "content": "And 3+3?"},
    {"role": "assistant", "content": "It is 6."},
]
# The form of Mistral's: no mark of generation, roles must alternate.
INST = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{% set first = 1 %}{% else %}{% set first = 0 %}{% endif %}
{%- for message in messages[first:] %}
  {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('roles must alternate') }}
  {%- endif %}
  {%- if message['role'] == 'user' %}
    {{- '[INST] ' + message['content'] | trim + ' [/INST]' }}
  {%- else %}
    {{- ' ' + message['content'] | trim + eos_token }}
  {%- endif %}
{%- endfor %}"""
# The form of Zephyr's and of many small models.
ROLES = """{% for message in messages %}
{{'<|' + message['role'] + '|>\n' + message['content'] + eos_token}}
{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""
# What templates use besides: macros, namespaces, loop controls, filters, methods.
RICH = """{% macro tag(role) %}<{{ role | upper }}>{% endmacro %}{% set seen = namespace(n=0) %}
{%- for message in messages %}{% set seen.n = seen.n + 1 %}
{%- if message.role == 'system' %}{{ message | tojson }}{% continue %}{% endif %}
{{- tag(message.role) }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content.strip().replace('6', 'six') }}{{ eos_token }}
{%- endgeneration %}{% else %}{{ message.content }}{{ seen.n }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<ASSISTANT>{% endif %}"""
TEMPLATES = {**{name: each.jinja for name, each in BUILT_IN.items()}, "inst": INST, "roles": ROLES, "rich": RICH}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    """A tokenizer's folder: byte-level BPE with special tokens, some of which the built-in templates write."""
    folder = tmp_path_factory.mktemp("tokenizer")
    stored = json.loads(
        train_bpe(["You add numbers. 2+2 is 4, and 3+3 is 6.\n" * 9, "Instruction Response"], 320).definition()
    )
    for token in ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"):
        number = len(stored["model"]["vocab"])
        stored["model"]["vocab"][token] = number
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        stored["added_tokens"].append({"id": number, "content": token, "special": True, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"}))
    return folder


@pytest.mark.parametrize(
    ("where", "config", "named"),
    [
        ("", {}, "<s>"),
        ("hugging_face", {}, "<s>"),
        ("", {"bos_token": ""}, ""),
        ("", {"added_tokens_decoder": {}}, ""),  # as in transformers
    ],
)
def test_special_tokens_that_stand_in_a_file_of_their_own(tmp_path: Path, where: str, config: dict, named: str) -> None:
    (tmp_path / where).mkdir(exist_ok=True)
    (tmp_path / where / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "{{ bos_token }}"}))
    template = own_template(tmp_path)
    assert template
    assert template.variables["bos_token"] == named


@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_tokens_and_answers_are_those_of_transformers(tokenizer: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer / "tokenizer.json"), **SPECIAL)
    template = TEMPLATES[name]
    ours, tokens = TemplateRenderer(template, SPECIAL), Tokenizer.load(tokenizer)
    for chat in (CHAT, CHAT[1:], CHAT[:3]):
        parts = ours.parts(chat)
        whole = oracle.apply_chat_template(chat, chat_template=template, tokenize=False)
        assert "".join(text for text, _ in parts) == whole
        for n in range(2, len(chat)):
            prompt = oracle.apply_chat_template(
                chat[:n], chat_template=template, tokenize=False, add_generation_prompt=True
            )
            assert ours.text(chat[:n], generation_prompt=True) == prompt
        [(ids, marks)] = tokens.encode_marked([parts])
        expected = oracle.apply_chat_template(
            chat, chat_template=template, return_dict=True, return_assistant_tokens_mask=ours.marks_answers
        )
        assert ids.tolist() == expected["input_ids"]
        if ours.marks_answers:
            assert marks.astype(int).tolist() == expected["assistant_masks"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_prompt_and_the_answer_are_the_whole(tokenizer: Path, name: str) -> None:
    """A prompt has the tokens that the conversation has in training."""
    renderer, tokens = TemplateRenderer(TEMPLATES[name], SPECIAL), Tokenizer.load(tokenizer)
    parts = renderer.parts(CHAT)
    answers = [text for text, answer in parts if answer]
    assert [text.strip().removesuffix("</s>").strip(" \n")[:1] for text in answers] in (["4", "I"],)
    [(ids, marks)] = tokens.encode_marked([parts])
    first = int(marks.argmax())
    [(prompt, _)] = tokens.encode_marked([[(renderer.text(CHAT[:2], generation_prompt=True), False)]])
    assert prompt.tolist() == ids[:first].tolist()


def test_special_tokens_of_a_template_are_tokens(tokenizer: Path) -> None:
    tokens = Tokenizer.load(tokenizer)
    [(ids, marks)] = tokens.encode_marked([TemplateRenderer(BUILT_IN["chatml"].jinja, SPECIAL).parts(CHAT)])
    [(end, _)] = tokens.encode_marked([[("<|im_end|>", False)]])
    assert end.size == 1
    assert (ids == end).sum() == 5
    assert marks[ids == end].tolist() == [False, False, True, False, True]
    assert tokens.encode("<|im_end|>").size > 1  # in a corpus it is text


HOSTILE = {
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "SecurityError",
    "{{ cycler.__init__.__globals__.os.popen('touch /tmp/x') }}": "SecurityError",
    "{{ raise_exception.__globals__.os }}": "SecurityError",
    "{{ self.__init__.__func__ }}": "SecurityError",
    "{{ messages.append(1) }}": "SecurityError",
    "{% set x = namespace(__class__=1) %}": "begins with an underscore",
    "{% include '/etc/passwd' %}": "no loader",
    "{% import 'os' as os %}": "no loader",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "calls itself without end",
    "{{ 'a' * 10 ** 9 }}": "SecurityError: a product of more than",
    "{{ 2 ** (10 ** 9) }}": "SecurityError: an exponent above",
    "{{ 'a'.ljust(10 ** 11) }}": "more memory than it may have",
    "{{ ('a' * 10 ** 6) | replace('a', 'b' * 10 ** 6) }}": "more memory than it may have",
    "{% for i in range(10 ** 6) %}{% endfor %}": "OverflowError: Range too big",
    "\n{% for m in messages": "line 2: TemplateSyntaxError",
    "\n\n{{ nothing.at.all }}": "line 3: UndefinedError",
    "{{ 'a' * 1000000 }}" * 70: "writes more than 67,108,864 characters",
}


@pytest.mark.parametrize(("source", "reason"), HOSTILE.items(), ids=lambda text: text[:30])
def test_a_hostile_template_does_nothing_but_fail(source: str, reason: str) -> None:
    # The limit of memory is the child process's; the sandbox is the same in both.
    trusted = "memory" not in reason
    with Renderer(ChatTemplate(source, SPECIAL, "hostile", trusted)) as renderer:
        with pytest.raises(ValueError, match=reason):
            renderer.parts(CHAT)
        assert (renderer._child is None) == trusted


def test_what_the_sandbox_hides_is_nothing() -> None:
    source = "{{ raise_exception.__globals__ }}{{ dict.fromkeys }}{{ self.__init__ }}{{ ''.__class__ }}"
    assert TemplateRenderer(source, {}).text(CHAT) == ""


def test_a_template_that_never_ends_is_ended_and_the_next_conversation_gets_a_new_process() -> None:
    loops = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    source = "{% if messages[0].content == 'loop' %}" + loops + "{% endif %}" + ROLES
    with Renderer(ChatTemplate(source, SPECIAL, "endless"), seconds=0.3) as renderer:
        assert renderer.parts(CHAT[1:])
        assert renderer._child is not None
        with pytest.raises(ValueError, match=r"did not end within 0.3 s of processor time"):
            renderer.parts([{"role": "user", "content": "loop"}, CHAT[2]])
        assert renderer.parts(CHAT[1:]) == TemplateRenderer(source, SPECIAL).parts(CHAT[1:])


def test_the_text_between_answers_cannot_be_forged() -> None:
    """The texts that mark answers are new each time, and a message cannot hold them."""
    renderer = TemplateRenderer(BUILT_IN["raw"].jinja, SPECIAL)
    forged = [{"role": "user", "content": "\ufdd0\ufdd1 {% generation %}x{% endgeneration %}"}, CHAT[2]]
    assert renderer.parts(forged) == [(forged[0]["content"], False), (" 4 </s>", True)]


def test_a_template_whose_answers_cannot_be_told_is_refused() -> None:
    source = "{% for m in messages %}{{ m.content | upper }}{{ loop.length }}{% endfor %}"
    with pytest.raises(ValueError, match=r"first 3 messages does not begin its text of all.*\{% generation %\}"):
        TemplateRenderer(source.replace("upper", "length"), SPECIAL).parts(CHAT)


def answers(source: str, chat: list[dict]) -> list[str]:
    parts = TemplateRenderer(source, SPECIAL).parts(chat)
    assert "".join(text for text, _ in parts) == TemplateRenderer(source, SPECIAL).text(chat)
    return [text for text, answer in parts if answer]


# The forms of Qwen 3 (the last answer gets a thought) and of R1 (the prompt begins a thought, which answers lose).
QWEN3 = (
    r"{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}"
    r"{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content.split('</think>')[-1].lstrip('\n') + '<|im_end|>\n' }}"
    r"{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
R1 = (
    r"{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<U>' + m.content }}"
    r"{% elif m.role == 'assistant' %}{{ '<A>' + m.content.split('</think>')[-1] }}"
    r"{% for call in m.tool_calls or [] %}{{ '<call>' + call.function.name + '</call>' }}{% endfor %}{{ eos_token }}"
    r"{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<A><think>\n' }}{% endif %}"
)
TURNS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nhello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "done"},
]


def test_answers_are_found_where_later_turns_change_earlier_ones() -> None:
    assert answers(QWEN3, TURNS) == ["hello<|im_end|>\n", "<think>\n\n</think>\n\ndone<|im_end|>\n"]
    assert answers(R1, TURNS) == ["\n\nhello</s>", "done</s>"]
    same = [{**each, "content": "hi"} for each in TURNS]
    assert answers(QWEN3, same) == ["hi<|im_end|>\n", "<think>\n\n</think>\n\nhi<|im_end|>\n"]
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look"}}]}
    assert answers(R1, [TURNS[0], call, *TURNS[2:]]) == ["<call>look</call></s>", "done</s>"]


@pytest.mark.parametrize("source", [QWEN3, R1, BUILT_IN["chatml"].jinja])
def test_a_message_that_is_not_trained_is_no_answer(source: str) -> None:
    marked = [TURNS[0], {**TURNS[1], "trained": False}, *TURNS[2:]]
    assert answers(source, marked) == answers(source, TURNS)[1:]


def test_the_day_is_that_of_the_template_and_is_recorded(tmp_path: Path) -> None:
    dated = ChatTemplate("{{ strftime_now('%d %b %Y %H:%M') }}", SPECIAL, "dated")
    with Renderer(dated) as renderer:
        assert renderer.prompt(CHAT) == "26 Jul 2024 00:00"
    other = replace(dated, date="2025-01-31")
    assert other.fingerprint != dated.fingerprint
    other.save(tmp_path)
    found = own_template(tmp_path)
    assert found is not None
    assert found.date == "2025-01-31"
    with Renderer(found) as renderer:
        assert renderer.prompt(CHAT) == "31 Jan 2025 00:00"
    (tmp_path / "tokenizer_config.json").write_text('{"template_date": "today"}')
    with pytest.raises(DataError, match="template_date is 'today', not a day such as 2024-07-26"):
        own_template(tmp_path)


def test_answers_without_a_stop_token_are_warned_of() -> None:
    open_ended = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    marked = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}</s>{% endfor %}"
    for source in (open_ended, marked):
        with Renderer(ChatTemplate(source, SPECIAL, "glm.jinja", trusted=True)) as renderer:
            renderer.parts([TURNS[1]])
            assert "glm.jinja: no answer ends with a stop token" in renderer.warning
    for source in (QWEN3, R1, *(each.jinja for each in BUILT_IN.values())):
        with Renderer(ChatTemplate(source, SPECIAL, "x", trusted=True)) as renderer:
            renderer.parts(TURNS)
            assert renderer.warning == ""


def test_a_template_that_leaves_out_an_answer_is_refused() -> None:
    parts = "{% for m in messages %}{{ m.role }}{% for c in m.content %}{{ c.text }}{% endfor %}</s>{% endfor %}"
    with pytest.raises(
        ValueError, match="message 2: the template does not write its content, which is text; it may ex"
    ):
        answers(parts, TURNS[:2])
    listed = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in TURNS[2:]]
    assert answers(parts, listed) == ["assistantdone</s>"]
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look"}}]}
    with pytest.raises(ValueError, match=r"message 2: the template does not write its tool_calls \(function 'look'\)"):
        answers(BUILT_IN["chatml"].jinja, [TURNS[0], call])


def test_templates_have_what_transformers_gives_them() -> None:
    source = (
        "{{ tools is none }} {{ documents is none }} {{ {'ä': [1]} | tojson }} {{ {'ä': 1} | tojson(ensure_ascii=true,"
    )
    source += " indent=1) }}{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}"
    source += "{{ i }}{% endfor %}"
    assert TemplateRenderer(source, {}).text(CHAT) == 'True True {"ä": [1]} {\n "\\u00e4": 1\n}02'


def test_templates_are_found_beside_the_tokenizer(tokenizer: Path, tmp_path: Path) -> None:
    data = Data(corpus="chat", path="x", tokenizer=str(tokenizer / "tokenizer.json"))
    with pytest.raises(DataError, match=r"comes with no chat template; nearest: data.template=chatml, llama3, alpaca"):
        find_template(data)
    with pytest.raises(DataError, match="data.tokenizer=char comes with no chat template"):
        find_template(Data(corpus="chat", path="x"))
    built_in = find_template(Data(corpus="chat", path="x", tokenizer=str(tokenizer), template="chatml"))
    assert built_in.trusted
    assert built_in.variables["bos_token"] == "<s>"
    named = {"chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": ROLES}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    found = own_template(tmp_path)
    assert found is not None
    assert (found.source, found.trusted) == (ROLES, False)
    (tmp_path / "chat_template.jinja").write_text(INST)
    found = own_template(tmp_path)
    assert found is not None
    assert found.source == INST  # the file of its own is newer than the field
    built_in.save(tmp_path)
    assert own_template(tmp_path) == ChatTemplate(
        BUILT_IN["chatml"].jinja, built_in.variables, str(tmp_path / "chat_template.jinja")
    )


def test_templates_by_name_are_the_default_one_and_not_for_rows_with_tools(tokenizer: Path, tmp_path: Path) -> None:
    folder, rows = tmp_path / "tokenizer", tmp_path / "rows.jsonl"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    rows.write_text(json.dumps({"messages": CHAT, "tools": [{"type": "function", "function": {"name": "look"}}]}))
    data = Data(corpus="chat", path=str(rows), tokenizer=str(folder))
    source = ROLES + "{{ tools }}"
    for by_name in ([{"name": n, "template": t} for n, t in (("tool_use", "no"), ("default", source))], None):
        value = {"default": source, "tool_use": "no"} if by_name is None else by_name
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
        assert find_template(data).source == source
        with pytest.raises(DataError, match="the row has tools, for which .* has another template, tool_use"):
            list(row_texts([rows], data))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text(source)
    assert len(list(row_texts([rows], data))) == 1
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("no")
    with pytest.raises(DataError, match="tool_use"):
        list(row_texts([rows], data))


def test_special_tokens_that_are_read_as_text_are_refused(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"split_special_tokens": true}')
    with pytest.raises(DataError, match="split_special_tokens is true"):
        find_template(Data(corpus="chat", path="x", tokenizer=str(tmp_path), template="chatml"))
    assert own_template(tmp_path) is None
    (tmp_path / "chat_template.jinja").write_text(ROLES)
    with pytest.raises(DataError, match="split_special_tokens is true"):
        own_template(tmp_path)


def test_damaged_template_files_are_refused(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    for text, reason in (("[1]", "holds a list"), ("{", "cannot be read"), ('{"chat_template": 3}', "is no text")):
        config.write_text(text)
        with pytest.raises(DataError, match=reason):
            own_template(tmp_path)
    config.unlink()
    (tmp_path / "chat_template.jinja").write_bytes(b"x" * (1 << 20) + b"y")
    with pytest.raises(DataError, match="larger than"):
        own_template(tmp_path)


def test_a_job_states_the_day_that_its_template_writes(tmp_path: Path) -> None:
    file = tmp_path / "dated.jinja"
    file.write_text("{{ strftime_now('%d %b %Y') }}")
    data = Data(corpus="chat", tokenizer="byte", template=str(file))
    dated = replace(data, template_date="2026-01-31")
    assert find_template(data).date == "2024-07-26"
    assert find_template(dated).date == "2026-01-31"
    assert find_template(dated).fingerprint != find_template(data).fingerprint
    find_template(dated).save(tmp_path)
    recorded = own_template(tmp_path)  # beside the shards
    assert recorded is not None
    assert recorded.date == "2026-01-31"
    with pytest.raises(JobError, match="template_date is 'today', not a day"):
        find_template(replace(data, template_date="today"))
    with pytest.raises(JobError, match="template_date has no effect: template chatml calls no strftime_now"):
        find_template(replace(dated, template="chatml"))


# The chat templates that trl ships: the text of transformers' own rendering, or refused (docs/guides/fine-tuning.md).
# trl is no dependency: its package is looked for, or PHALANX_TRL names the folder of its templates.

_PACKAGE = importlib.util.find_spec("trl")
_INSTALLED = Path(_PACKAGE.origin).parent / "chat_templates" if _PACKAGE and _PACKAGE.origin else ""
FOLDER = Path(os.environ.get("PHALANX_TRL") or _INSTALLED)
FILES = sorted(FOLDER.glob("*.jinja")) if FOLDER.name else []
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
REFUSED = ("idefics3", "smolvlm", "llava_next")
"""They write contents as lists of parts."""
NO_STOP = ("glm4moe",)
"""Nothing follows an answer but the next turn."""
ONE = [{"role": "user", "content": "2+2? <b> é"}, {"role": "assistant", "content": "It is 4."}]
TWO = [*ONE, {"role": "user", "content": "And 3+3?"}, {"role": "assistant", "content": "It is 6."}]
THOUGHT = [{**each, "reasoning_content": "Add."} if each["role"] == "assistant" else each for each in TWO]
need_trl = pytest.mark.skipif(not FILES, reason="trl is not installed (pip install trl), nor PHALANX_TRL set")


def _undated(text: str) -> str:
    """Returns a text without the day, which is today's in transformers."""
    return re.sub(r"\d{4}-\d\d-\d\d|\d\d \w{3,9} \d{4}", "DAY", text)


@need_trl
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_template_of_trl_renders_as_in_transformers(file: Path) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    template = ChatTemplate(file.read_text(), NAMED, file.name)
    name = file.stem.removesuffix("_training")
    with Renderer(template) as renderer:
        if name in REFUSED:
            with pytest.raises(ValueError, match="answer|attribute|content"):
                renderer.parts(ONE)
            return
        for chat in (ONE, TWO, THOUGHT):
            parts = renderer.parts(chat)
            [[expected], _] = render_jinja_template([chat], chat_template=template.source, **NAMED)
            assert _undated("".join(text for text, _ in parts)) == _undated(expected)
            answers = ["".join(text for text, _ in run) for answer, run in groupby(parts, itemgetter(1)) if answer]
            assert len(answers) == len(chat) // 2
            assert all(f"It is {digit}." in text for digit, text in zip("46", answers, strict=False))
        assert bool(renderer.warning) == (file.stem in NO_STOP)


@need_trl
def test_the_table_names_templates_that_there_are() -> None:
    names = {file.stem.removesuffix("_training") for file in FILES}
    assert {*REFUSED, *NO_STOP} <= names
    assert len(FILES) >= 72
