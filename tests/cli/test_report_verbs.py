"""`phalanx report`, `watch` and `profile`: files, documents, and what is said about words that are wrong."""

import json
import os
import pty
import subprocess
import sys
import time

import pytest

from phalanx.cli.main import main
from report.written import rows, run
from train.profile.test_profiles import DOCUMENT

# `phalanx report` and `phalanx watch`: files, documents, and what is said about words that are wrong.


def test_a_report_is_written(tmp_path, capsys, monkeypatch):
    folder = str(run(tmp_path / "main"))
    other = str(run(tmp_path / "other", rows(20)))
    assert main(["report", folder]) == 0
    assert capsys.readouterr().out == f"written: {folder}/report.html\n"
    assert main(["report", folder, other, "--compare", "--out", str(tmp_path / "both.html")]) == 0
    assert "2 runs compared" in (tmp_path / "both.html").read_text()
    monkeypatch.chdir(tmp_path)
    assert main(["report", folder, other]) == 0
    assert (tmp_path / "report.html").exists()
    capsys.readouterr()
    assert main(["report", folder, other, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [each["measured"]["step"] for each in document["runs"]] == [40, 20]
    assert document["runs"][0]["measured"]["tps_total"] == 2469134.0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["report", "{run}x"], 2, "did you mean {run}?"),
        (["report", "{run}", "--compare"], 2, "--compare needs several runs"),
        (["report", "{run}", "--out", "{run}/no/x.html"], 2, "does not exist"),
        (["report", "{run}", "--ot", "x"], 2, "did you mean --out?"),
        (["watch", "{run}", "{run}"], 2, "takes RUN"),
        (["watch", "{run}x", "--once"], 2, "no run in"),
    ],
)
def test_wrong_words(tmp_path, monkeypatch, capsys, words, code, said):
    monkeypatch.chdir(tmp_path)  # away from runs of whoever tests
    folder = str(run(tmp_path / "main"))
    assert main([word.format(run=folder) for word in words]) == code
    assert said.format(run=folder) in capsys.readouterr().err


def test_neither_verb_imports_torch(tmp_path):
    folder = str(run(tmp_path / "main"))
    code = (
        "import sys; from phalanx.cli.main import run; "
        f"run(['report', {folder!r}]); run(['watch', {folder!r}, '--once']); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False, capture_output=True).returncode == 0


def test_watching_once(tmp_path, capsys):
    folder = str(run(tmp_path / "main"))
    assert main(["watch", folder, "--once"]) == 0
    assert "tps_total   2,469,134" in capsys.readouterr().out
    assert main(["watch", folder, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "finished"


def test_watching_on_a_terminal(tmp_path):
    """The view is renewed until the run ends, without a torn figure at 80 columns."""
    folder = run(tmp_path / "main", rows()[:11])
    (folder / ".lock").write_text("{}")
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm", COLUMNS="80", LINES="24")
        os.execv(sys.executable, [sys.executable, "-P", "-m", "phalanx", "watch", str(folder)])
    seen = _until(terminal, b"step 10 of 40")
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows()[11:])
    (folder / ".lock").write_text("")
    seen += _until(terminal, b"finished")
    assert os.waitpid(pid, 0)[1] == 0
    assert b"2,469,134" in seen
    assert b"\x1b[" in seen, "it moves the cursor"


def _until(terminal: int, words: bytes) -> bytes:
    seen, end = b"", time.monotonic() + 60
    while words not in seen:
        assert time.monotonic() < end, seen
        seen += os.read(terminal, 1 << 16)
    return seen


# `phalanx profile`: the text, the document, and what is said about a run that has none.


@pytest.fixture
def profiled(tmp_path):
    (tmp_path / "runs" / "main" / "traces").mkdir(parents=True)
    (tmp_path / "runs" / "main" / "traces" / "profile.json").write_text(json.dumps(DOCUMENT))
    return tmp_path / "runs" / "main"


def test_a_profile_is_shown_again(profiled, capsys):
    assert main(["profile", str(profiled)]) == 0
    assert "predicted beside measured: rank 1, cluster local" in capsys.readouterr().out
    assert main(["profile", str(profiled / "traces" / "profile.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == DOCUMENT
    assert main(["profile", "--help"]) == 0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["{run}x"], 2, "did you mean {run}?"),
        (["{run}/.."], 2, "no profile in"),
        (["{run}", "--jsn"], 2, "unknown option --jsn"),
        (["{run}", "b"], 2, "takes RUN, found {run} b"),
        (["--json"], 2, "takes RUN, found nothing"),
    ],
)
def test_mistakes_are_one_message(profiled, capsys, words, code, said):
    assert main(["profile", *(word.format(run=profiled) for word in words)]) == code
    assert said.format(run=profiled) in capsys.readouterr().err
