"""Variables that a launch exports, and those that it keeps."""

import pytest

from phalanx.errors import JobError
from phalanx.launch.exported import exported, is_secret


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "PGPASSWORD", "MY_PASSWD"),
        *("PMI_SHARED_SECRET", "GOOGLE_APPLICATION_CREDENTIALS", "SSH_AUTH_SOCK", "API_KEYS", "OPENAI_KEY"),
    ],
)
def test_secrets_are_known_by_their_names(name):
    assert is_secret(name)


@pytest.mark.parametrize("name", ["NCCL_DEBUG", "TOKENIZERS_PARALLELISM", "KEYBOARD", "OMP_NUM_THREADS", "HF_HOME"])
def test_others_are_none(name):
    assert not is_secret(name)


ENV = {
    "NCCL_DEBUG": "INFO",
    "HF_TOKEN": "hf_secret",
    "HF_HOME": "/hf",
    "EDITOR": "vi",
    "CUDA_VISIBLE_DEVICES": "0",
    "https_proxy": "http://me:secret@proxy:1",
    "NCCL_ODD": "a\nb",
    "WANDB_MODE": "offline",
}


def test_the_default_list():
    found = exported(ENV, (), (), {})
    assert found.values == {"NCCL_DEBUG": "INFO", "HF_HOME": "/hf"}
    assert found.secrets == ()


def test_patterns_take_no_secrets_and_exact_names_do():
    assert exported(ENV, ("*",), (), {}).values.keys() == {"NCCL_DEBUG", "HF_HOME", "EDITOR", "WANDB_MODE"}
    found = exported(ENV, ("HF_TOKEN", "WANDB_*"), (), {})
    assert found.secrets == ("HF_TOKEN",)
    assert "hf_secret" not in str(found)
    assert found.values["WANDB_MODE"] == "offline"


def test_settings_win_over_the_environment_which_wins_over_the_site():
    found = exported(ENV, (), ("NCCL_DEBUG=WARN", "X=a=b"), {"NCCL_DEBUG": "TRACE", "HF_HOME": "/site", "Y": "1"})
    assert found.values == {"NCCL_DEBUG": "WARN", "HF_HOME": "/hf", "X": "a=b", "Y": "1"}


def test_all_problems_at_once():
    with pytest.raises(JobError) as caught:
        exported(ENV, ("WANDB_MOD",), ("novalue", "HF_TOKEN=x", "A=\x1b[1m", "1A=2"), {})
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        *("--export-env WANDB_MOD", "--env novalue", "--env HF_TOKEN", "--env A", "--env 1A")
    ]
    assert "did you mean WANDB_MODE?" in caught.value.problems[0]
    assert "HF_TOKEN=x" not in str(caught.value)
