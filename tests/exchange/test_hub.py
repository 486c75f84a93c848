"""Models of the hub: downloaded on request only, and one message where they cannot be."""

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from exchange.folders import write_folder
from phalanx.cli.main import main
from phalanx.errors import JobError, RunError
from phalanx.exchange import folder as hub


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_a_model_of_the_hub_is_imported_from_what_was_downloaded(tmp_path, monkeypatch, capsys):
    write_folder(tmp_path / "theirs")
    asked = []

    def download(repository: str, **options: object) -> str:
        asked.append((repository, options))
        return str(tmp_path / "theirs")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert main(["import", "hf", "hub:someone/llama@main", "--out", "ours"]) == 0
    [(repository, options)] = asked
    assert (repository, options["revision"]) == ("someone/llama", "main")
    assert not any(pattern.endswith((".bin", ".py")) for pattern in options["allow_patterns"])
    assert "phalanx generate ours" in capsys.readouterr().out
    assert main(["import", "hf", "hub:someone/llama", "--out", "ours"]) == 2
    assert len(asked) == 1  # nothing is downloaded for a target that exists


def test_without_a_network_the_message_says_what_to_do():
    with pytest.raises(RunError, match=r"(?s)hub:openai-community/gpt2 is neither in the cache.*hf download"):
        hub.downloaded("hub:openai-community/gpt2")


@pytest.mark.parametrize("text", ["hub:", "hub:../x", "hub:a/b/c", "hub:https://x/y"])
def test_what_is_no_name_of_a_model_is_refused(text):
    with pytest.raises(JobError, match="no name of a model"):
        hub.downloaded(text)
