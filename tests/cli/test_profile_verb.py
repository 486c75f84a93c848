"""`phalanx profile`: the text, the document, and what is said about a run that has none."""

import json

import pytest

from phalanx.cli.main import main
from train.profile.test_trace_parts import DOCUMENT


@pytest.fixture
def run(tmp_path):
    (tmp_path / "runs" / "main" / "traces").mkdir(parents=True)
    (tmp_path / "runs" / "main" / "traces" / "profile.json").write_text(json.dumps(DOCUMENT))
    return tmp_path / "runs" / "main"


def test_a_profile_is_shown_again(run, capsys):
    assert main(["profile", str(run)]) == 0
    assert "predicted beside measured: rank 1, cluster local" in capsys.readouterr().out
    assert main(["profile", str(run / "traces" / "profile.json"), "--json"]) == 0
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
def test_mistakes_are_one_message(run, capsys, words, code, said):
    assert main(["profile", *(word.format(run=run) for word in words)]) == code
    assert said.format(run=run) in capsys.readouterr().err
