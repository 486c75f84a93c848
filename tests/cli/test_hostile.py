"""Hostile input: one message and the exit code, at once, without a traceback. Mutations of valid files: tests/fuzz."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.data.tokenizer import NumberTokenizer, Tokenizer
from phalanx.errors import DataError
from phalanx.launch.verdict import Outcome

pytestmark = pytest.mark.timeout(60)
"""Each takes far less than 2 s on an idle machine; without a bound they would take minutes, or for ever."""

LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))
HEAD = "model_name,gpu,n_gpus,dp,global_batch_seqs"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """Returns the message of a command that has to fail with this code."""
    assert main(argv) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("phalanx: ")
    assert len(captured.err) < 100_000
    return captured.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 100_000, "job.yaml:1: nested deeper than 20 levels"),
        ("train: " + "{a: " * 30_000, "job.yaml:1: nested deeper than 20 levels"),
        ("- " * 100_000, "job.yaml:1: nested deeper than 20 levels"),
        ("".join(f"k{n}: 1\n" for n in range(30_000)), "cannot be read: it is larger than 256.0KiB"),
        ("".join(f"k{n}: 1\n" for n in range(20_000)), "\n  and 19,960 more problems"),
        ("".join(f"k{n}: {{a: 1}}\n" for n in range(9_000)), "\n  and 8,960 more problems"),
        ("".join(f"%TAG !a{n}! b\n" for n in range(8_000)) + "---\ntrain: {stepz: 1}\n", "unknown key train.stepz"),
        (LAUGHS, "job.yaml:1: unknown key a0"),
        ("a: &a [*a]\n", "job.yaml:1: "),
        (f"? {'steps' * 50_000}\n: 1\n", "characters left out"),
        (f"train: {{steps: {'9' * 100_000}}}", "expected a whole number, found 100,000 characters"),
        ("train: {steps: 1e400}", "expected a whole number, found '1e400'"),
        ("optimizer: {lr: .nan}", "expected a number, found '.nan'"),
        ("optimizer: {lr: -0}\ntrain: {steps: -0}", "must be"),
        ('data: {dir: "a\\0b"}', "data.dir: is 'a\\x00b': no file name holds a NUL byte"),
        ("train:\x00 {steps: 1}", "not valid YAML"),
        (b"\xff\xfet\x00r\x00", "is not UTF-8 text"),
        (b"\xef\xbb\xbftrain: {stepz: 1}", "job.yaml:1: unknown key train.stepz"),
    ],
    ids=lambda value: repr(value[:24]),
)
def test_jobs(content, message, here, capsys):
    (here / "job.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert message in refusal(["plan", "job.yaml"], capsys)


def test_jobs_and_other_files_that_are_no_regular_files(here, capsys):
    (here / "zero.yaml").symlink_to("/dev/zero")
    os.mkfifo("pipe.yaml")
    (here / "folder.yaml").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket.yaml")
        for name, kind in (
            ("zero", "a character device"),
            ("pipe", "a named pipe"),
            ("folder", "a directory"),
            ("socket", "a socket"),
        ):
            file = f"{name}.yaml"
            for argv in (["train", file], ["schedule", "check", file], ["predict", "--table", file]):
                assert f"cannot be read: it is {kind}, not a regular file" in refusal(argv, capsys)
            said = refusal(
                ["data", "prepare", "data.corpus=text", "data.path=x", f"data.tokenizer={file}"],
                capsys,
                2 if name == "folder" else 4,
            )
            assert "tokenizer" in said
    for name in ("a.txt", "b.jsonl"):
        folder = here / f"corpus-{name}"
        folder.mkdir()
        os.mkfifo(folder / name)
        argv = ["data", "prepare", "data.corpus=text", f"data.path={folder}", "data.dir=shards"]
        assert f"{name}: it is a named pipe, not a regular file" in refusal(argv, capsys, 4)


def test_command_lines(capsys):
    assert "and 99,960 more problems" in refusal(["plan", *(f"k{n}=1" for n in range(100_000))], capsys)
    assert "and 9,960 more problems" in refusal(["plan", *(f"--k{n}=1" for n in range(10_000))], capsys)
    assert "and 9,960 more problems" in refusal(["schedule", "list", *(f"--k{n}" for n in range(10_000))], capsys)
    for word in ("run.name=a\udcff", "a\udcff.yaml", "--a\udcff"):
        assert f"{word!a} is not UTF-8" in refusal(["plan", word], capsys)
    long = "a" * 100_000
    assert "no such file" in refusal(["data", "prepare", "data.corpus=text", f"data.path={long}"], capsys, 2)
    for argv in ([long], ["train", long], ["train", f"layout.schedule={long}"], ["generate", long]):
        refusal(argv, capsys, 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f"{HEAD}\n" + "llama3-8b,H100,8,8,16\n" * 1_000_000, "more than 100,000 rows"),
        (f"{HEAD}\n" + "\r" * 1_000_000, "more than 100,000 rows"),
        (f"{HEAD}{',a' * 1_000_000}\n", "a line of the table has more than 1,048,576 characters"),
        (f"{HEAD}{',a' * 5000}\n1\n", "the table has 5,005 columns; at most 1,000"),
        ("a" * 2**21, "a line of the table has more than 1,048,576 characters"),
        (f'{HEAD}\n"' + "aaaaaaaaaaaaaaaaaaaa\n" * 60_000, "of the table is not CSV: field larger than"),
    ],
    ids=["rows", "carriage returns", "wide", "columns", "line", "cell"],
)
def test_tables(content, message, here, capsys):
    (here / "table.csv").write_text(content)
    assert message in refusal(["predict", "--table", "table.csv", "--out", "out.csv"], capsys)
    assert os.listdir(here) == ["table.csv"]


def test_a_table_from_a_pipe_is_read_until_it_is_too_long(here):
    """A pipe that the shell has opened has a writer; a named pipe may have none."""
    program = (
        "import sys; from phalanx.cli.main import main; from phalanx.validation import table; table.MOST_ROWS = 3; "
        "sys.exit(main(['predict', '--table', '/dev/stdin']))"
    )
    for rows, code in ((3, 0), (4, 2)):
        text = f"{HEAD}\n" + "llama3-8b,H100,8,8,16\n" * rows
        done = subprocess.run(
            [sys.executable, "-c", program], input=text, capture_output=True, text=True, check=False, timeout=60
        )
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
        assert done.stdout.count("llama3-8b") == 3


def test_cells_of_a_table(here, capsys):
    cells = [" " * 100_000, "9" * 100_000, "1" + " " * 5_000 + "x", "1e400", "nan", "-0", "\x00", "-l" + "9" * 1_000]
    (here / "table.csv").write_text("model_name,gpu,n_gpus\n" + "".join(f"llama3-8b{c},H100,1{c}\n" for c in cells))
    assert main(["predict", "--table", "table.csv", "--out", "out.csv"]) == 0
    assert "of 8 rows predicted" in capsys.readouterr().err
    assert "n_gpus: 100,001 characters; at most 2,000" in (here / "out.csv").read_text()


@pytest.mark.parametrize("content", ["0F0," * 11_000_000, "x," * 2_000_000], ids=["cells", "problems"])
def test_schedules(content, here, capsys):
    (here / "mine.csv").write_text(content)
    assert "mine.csv: " in refusal(["schedule", "check", "mine.csv"], capsys)


DATA = ["data", "prepare", "data.corpus=text", "data.path=corpus.jsonl", "data.dir=shards", "data.tokenizer=mine.json"]


@pytest.mark.parametrize(
    ("corpus", "tokenizer", "message"),
    [
        ("[" * 100_000, "{}", "corpus.jsonl: nested deeper than"),
        (json.dumps({f"k{n}": 1 for n in range(100_000)}), "{}", "'k19' and 99,980 more); name it"),
        ('{"text": "\\ud800"}', "{}", "the field 'text' holds half a surrogate pair"),
        ('{"text": "x"}', "[" * 100_000, "mine.json is not JSON and so no tokenizer: nested deeper than"),
        ('{"text": "x"}', f'{{"a": {"9" * 5000}}}', "a whole number of 5,000 digits"),
        ('{"text": "x"}', "null", "the tokenizers library cannot load it"),
        *(
            ('{"text": "x"}', json.dumps({"format": "phalanx-tokenizer", "version": 1, **definition}), message)
            for definition, message in (
                (
                    {"kind": "char", "characters": "\ud800x", "unknown": True},
                    "a text in it holds half a surrogate pair",
                ),
                ({"kind": "char", "characters": "aa", "unknown": True}, "its characters are not distinct"),
                ({"kind": "number", "vocab_size": 2**40}, "a vocabulary of 1,099,511,627,776 tokens; at most"),
                ({"kind": "number", "vocab_size": 10**40}, "a whole number of 41 digits"),
                ({"kind": ["a" * 10**6]}, "characters left out"),
            )
        ),
    ],
)
def test_data(corpus, tokenizer, message, here, capsys):
    if "tokenizers library" in message:
        pytest.importorskip("tokenizers")
    (here / "corpus.jsonl").write_text(corpus)
    (here / "mine.json").write_text(tokenizer)
    argv = DATA if tokenizer != "{}" else [*DATA[:-1], "data.tokenizer=char"]
    assert message in refusal(argv, capsys, 4)


def test_file_names_of_a_corpus_need_not_be_text(here, capsys):
    (here / "corpus").mkdir()
    (here / os.fsdecode(b"corpus/\xff.txt")).write_text("some text")
    assert main(["data", "prepare", "data.corpus=text", "data.path=corpus", "data.dir=shards"]) == 0
    assert "characters: 9" in capsys.readouterr().out


def test_a_tokenizer_that_loads_and_cannot_encode(here):
    """The library knows only when it encodes that this one has no token for unknown words."""
    definition = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}}
    names = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    (here / "mine.json").write_text(json.dumps({**definition, **dict.fromkeys(names), "added_tokens": []}))
    with pytest.raises(DataError, match=r"mine\.json: the tokenizers library cannot encode a text"):
        Tokenizer.load(here / "mine.json")


def test_prompts_of_any_kind():
    tokenizer = NumberTokenizer(7)
    for prompt in ("9" * 5000, "١", "\ud800", "-1"):
        with pytest.raises(DataError, match="is not a number from 0 to 6"):
            tokenizer.encode(prompt)


@pytest.mark.parametrize(
    "content",
    [
        *("", "null", "[]", "{}", "1", '"x"', "[" * 100_000, "9" * 5000, '{"rank": 0}', "\x00"),
        '{"rank": 0, "code": "1", "message": "x", "traceback": null, "time": 1.0}',
        '{"rank": 0, "code": 1, "message": null, "traceback": null, "time": 1.0}',
        '{"rank": 0, "code": 1, "message": "x", "traceback": 3, "time": 1.0}',
        '{"rank": 0, "code": 1, "message": "x", "traceback": null, "time": "now"}',
        "a" * 2**23,
    ],
    ids=lambda content: repr(content[:60]),
)
def test_outcomes_that_no_rank_has_written_are_none(content, tmp_path):
    (tmp_path / "outcome.json").write_text(content)
    assert Outcome.read(tmp_path) is None


def test_outcomes_that_ranks_write_are_read_whatever_they_say(tmp_path):
    for message in ("\ud800\x1b[31m", "€" * 100_000, ""):
        written = Outcome(1, 4, message, None, 1.5)
        written.write(tmp_path)
        assert Outcome.read(tmp_path) == written
    extra = {"rank": 1, "code": 0, "message": "", "traceback": "x", "time": 2, "new": 1}
    (tmp_path / "outcome.json").write_text(json.dumps(extra))
    assert Outcome.read(tmp_path) == Outcome(1, 0, "", "x", 2.0)
