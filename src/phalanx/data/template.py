"""Finds the chat template of a job's data, and renders conversations with it.

A tokenizer's own template stands beside its tokenizer.json: in chat_template.jinja, or in tokenizer_config.json, which
also names the special tokens that templates write. Prepared shards and runs carry both files, so that whoever has a run
can make a prompt for its model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

from phalanx.bounded import parse_json, read_bytes, read_text
from phalanx.config.data import Data
from phalanx.config.templates import BUILT_IN, OWN_TEMPLATE
from phalanx.config.tokenizers import END_OF_TEXT, TOKENIZERS
from phalanx.data.answers import Part, open_answers
from phalanx.data.files import write_atomic
from phalanx.data.render import RENDER_S, TEMPLATE_DATE, TemplateRenderer
from phalanx.data.tokenizer import Tokenizer
from phalanx.errors import DataError, JobError, NotFoundError, RunError
from phalanx.nearest import near_file

JINJA_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILES = (JINJA_FILE, CONFIG_FILE)
"""The files beside a tokenizer.json."""
DATE_KEY = "template_date"
"""The field of a tokenizer_config.json that holds the day of its template, where shards or a run have one."""
MOST_TEMPLATE = 1 << 20
"""Most bytes of a template. The longest published one has about 20 kB."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
"""The special tokens that a template may write, by the names that it knows them by."""
CHILD = "import sys; sys.path[:] = sys.argv[1:]; from phalanx.data.render import serve; serve()"


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, with the special tokens that it may write."""

    source: str
    """Jinja."""
    variables: Mapping[str, str]
    origin: str
    """Where it comes from, for messages."""
    trusted: bool = False
    """True for this project's own, which need no process of their own."""
    date: str = TEMPLATE_DATE
    """The day that `strftime_now` writes, as ISO 8601 has it."""

    @property
    def writes_date(self) -> bool:
        """Whether the template asks for the day."""
        return "strftime_now" in self.source

    @property
    def fingerprint(self) -> str:
        """sha256 (hex): equal fingerprints make the same texts."""
        dated = [self.date] if self.writes_date else []
        return hashlib.sha256(json.dumps([self.source, dict(self.variables), *dated]).encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Writes the files that stand beside a tokenizer.json."""
        write_atomic(folder / JINJA_FILE, self.source.encode())
        config = dict(self.variables) | ({DATE_KEY: self.date} if self.writes_date else {})
        write_atomic(folder / CONFIG_FILE, (json.dumps(config, ensure_ascii=False) + "\n").encode())


def find_template(data: Data) -> ChatTemplate:
    """Returns the template of a job's data, with its day. Raises DataError if there is none, or if a file is not one;
    JobError for a day that is none, or that the template does not write."""
    found = _template_of(data)
    if not data.template_date:
        return found
    if not found.writes_date:
        raise JobError(f"data.template_date has no effect: {found.origin} calls no strftime_now")
    try:
        datetime.fromisoformat(data.template_date)
    except ValueError:
        raise JobError(f"data.template_date is {data.template_date!r}, not a day such as {TEMPLATE_DATE}") from None
    return replace(found, date=data.template_date)


def _template_of(data: Data) -> ChatTemplate:
    variables = _special_tokens(data)
    if data.template in BUILT_IN:
        return ChatTemplate(BUILT_IN[data.template].jinja, variables, f"template {data.template}", trusted=True)
    if data.template != OWN_TEMPLATE:
        path = Path(data.template).expanduser()
        folder = _folder(data)
        date = TEMPLATE_DATE if data.tokenizer in TOKENIZERS else _date(_config(folder), folder)
        return ChatTemplate(_read(path), variables, str(path), date=date)
    if data.tokenizer not in TOKENIZERS and (found := own_template(_folder(data))):
        return found
    raise DataError(
        f"data.template=tokenizer: data.tokenizer={data.tokenizer} comes with no chat template; nearest: "
        f"data.template={', '.join(BUILT_IN)}, or a .jinja file"
    )


def template_identity(data: Data) -> dict[str, object]:
    """Returns what determines the texts of a data set, besides its rows and its settings."""
    return {"template": find_template(data).fingerprint}


def own_template(folder: Path) -> ChatTemplate | None:
    """Returns the template in the folder of a tokenizer or of a run; None if there is none. Raises DataError if its
    files cannot be read."""
    config = _config(folder)
    variables, date = _named_tokens(config), _date(config, folder)
    if os.path.exists(folder / JINJA_FILE):
        return ChatTemplate(_read(folder / JINJA_FILE), variables, str(folder / JINJA_FILE), date=date)
    source = config.get("chat_template")
    if isinstance(source, list):  # several by name
        named = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}
        source = named.get("default")
    if source is None:
        return None
    if not isinstance(source, str) or len(source) > MOST_TEMPLATE:
        raise DataError(f"{folder / CONFIG_FILE}: its chat_template is no text of at most {MOST_TEMPLATE:,} characters")
    return ChatTemplate(source, variables, str(folder / CONFIG_FILE), date=date)


class Renderer:
    """Renders conversations with one template: in a child process, unless the template is this project's own. There a
    conversation may take `seconds` of processor time. A context manager. Raises JobError without Jinja."""

    def __init__(self, template: ChatTemplate, seconds: float = RENDER_S):
        _require_jinja()
        self.template, self.seconds = template, seconds
        self._child: subprocess.Popen[bytes] | None = None
        self._renderer: TemplateRenderer | None = None
        self.answers = self.open_answers = 0
        """The answers of all conversations so far, and those of them that no token ends."""

    def __enter__(self) -> Renderer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()

    def parts(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> list[Part]:
        """Returns the parts of a conversation's text, each with whether it is an answer's. Raises ValueError, saying
        why, if the template refuses it, fails or does not end."""
        if self.template.trusted:
            parts = self._here().parts(messages, tools)
        else:
            parts = [(text, answer) for text, answer in self._ask({"messages": messages, "tools": [*tools]})["parts"]]
        self.answers += sum(answer for _, answer in parts)
        self.open_answers += open_answers(parts, messages, self.template.variables.get("eos_token", ""))
        return parts

    @property
    def warning(self) -> str:
        """A warning about answers that no token ends; empty if there are none."""
        if not self.open_answers:
            return ""
        count = "no answer ends" if self.open_answers >= self.answers else f"{self.open_answers:,} answers do not end"
        return (
            f"warning: {self.template.origin}: {count} with a stop token, so the model does not learn to stop: write "
            "one after the answer (inside {% generation %}, if it is there), as {{ message.content + eos_token }}, "
            "in a copy of the template for data.template, or choose data.template=chatml"
        )

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Returns the text of messages up to where the model's answer begins. Raises ValueError as `parts` does."""
        if self.template.trusted:
            return self._here().text(messages, generation_prompt=True)
        return self._ask({"messages": messages, "prompt": True})["text"]

    def close(self) -> None:
        """Ends the child process."""
        if (child := self._child) is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close() if pipe else None
        self._child = None

    def _here(self) -> TemplateRenderer:
        if self._renderer is None:
            self._renderer = TemplateRenderer(self.template.source, self.template.variables, self.template.date)
        return self._renderer

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        child = self._child or self._start()
        line = self._exchange(child, json.dumps(request).encode() + b"\n")
        if not line:
            code = child.wait()
            self.close()
            if code == -signal.SIGPROF:
                raise ValueError(f"the template did not end within {self.seconds:g} s of processor time")
            if code in (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGABRT):
                raise ValueError(f"the process that renders the template ended with signal {-code}")
            raise RunError(f"a process that renders chat templates ended with exit code {code}")
        reply = json.loads(line)
        if "error" in reply:
            raise ValueError(reply["error"])
        return reply

    def _start(self) -> subprocess.Popen[bytes]:
        # Without -P a file in the working directory could stand for a module.
        command = [sys.executable, "-P", "-c", CHILD, *sys.path]
        child = self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        source, variables = self.template.source, dict(self.template.variables)
        first = {"source": source, "variables": variables, "date": self.template.date, "seconds": self.seconds}
        assert child.stdin is not None
        child.stdin.write(json.dumps(first).encode() + b"\n")
        return child

    @staticmethod
    def _exchange(child: subprocess.Popen[bytes], request: bytes) -> bytes:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(request)
            child.stdin.flush()
        except BrokenPipeError:
            return b""
        return child.stdout.readline()


def _require_jinja() -> None:
    """Raises JobError unless Jinja is here, without the holes that its sandbox had before."""
    try:
        found = version("jinja2")
    except PackageNotFoundError:
        found = "none"
    if not re.match(r"3\.1\.([6-9]|\d\d)|3\.([2-9]|\d\d)|[4-9]", found):
        raise JobError(f"chat templates need jinja2 >= 3.1.6, found {found}: pip install 'phalanx[chat]'")


def _folder(data: Data) -> Path:
    path = Path(data.tokenizer).expanduser()
    return path if os.path.isdir(path) else path.parent


def _special_tokens(data: Data) -> Mapping[str, str]:
    """Returns the special tokens of the job's tokenizer. One that names none ends its answers as it ends documents."""
    if data.tokenizer not in TOKENIZERS:
        found = _named_tokens(_config(_folder(data)))
        if not found["eos_token"]:
            tokenizer = Tokenizer.load(Path(data.tokenizer).expanduser())
            found["eos_token"] = tokenizer.decode(tokenizer.separator)
        return found
    end = END_OF_TEXT[0] if TOKENIZERS[data.tokenizer].read is None else "\n"
    return dict.fromkeys(SPECIAL_TOKENS, "") | {"eos_token": end}


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the special tokens that a tokenizer_config.json names, which it writes as texts or as objects."""
    found = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        found[name] = value if isinstance(value, str) else ""
    return found


def _date(config: Mapping[str, Any], folder: Path) -> str:
    date = config.get(DATE_KEY, TEMPLATE_DATE)
    try:
        datetime.fromisoformat(date)
    except (TypeError, ValueError):
        raise DataError(f"{folder / CONFIG_FILE}: {DATE_KEY} is {date!r}, not a day such as {TEMPLATE_DATE}") from None
    return date


def _config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    if not os.path.exists(path):
        return {}
    try:
        config = parse_json(read_bytes(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(config, dict):
        raise DataError(f"{path} holds {type(config).__name__}, not an object")
    return config


def _read(path: Path) -> str:
    try:
        return read_text(path, MOST_TEMPLATE)
    except FileNotFoundError:
        raise NotFoundError(f"data.template={path}: there is no such file{near_file(path)}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"the chat template {path} cannot be read: {reason}") from error
