"""The completion scripts in the shells that are installed: bash, and zsh and fish where they are."""

import shutil
import subprocess

import pytest

from phalanx.cli.completion import SHELLS, words
from phalanx.cli.main import VERBS, main

COMPLETED = [
    ("phalanx tr", "train"),
    ("phalanx train --fr", "--fresh"),
    ("phalanx train layout.recompute_c", "layout.recompute_cut="),
    ("phalanx schedule sh", "show"),
    ("phalanx data prep", "prepare"),
    ("phalanx generate --temp", "--temperature"),
    ("phalanx init --no", "--no-plan"),
]
VALUES = [
    ("phalanx plan cluster=dgx-h100-", "cluster=dgx-h100-nvl256"),
    ("phalanx train --layout.recompute=s", "--layout.recompute=selective"),
    ("phalanx train schedule=zb_v", "schedule=zb_v"),
]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("completion")
    for shell, script in SHELLS.items():
        (folder / shell).write_text(script(words()))
    return folder


def in_shell(shell: str, *argv: str, cwd) -> str:
    if not shutil.which(shell):
        pytest.skip(f"no {shell}")
    done = subprocess.run([shell, *argv], capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_valid(shell, scripts):
    in_shell(shell, "-n", shell, cwd=scripts)


def test_bash_completes(scripts):
    tries = "\n".join(
        f'COMP_LINE="{line}"; COMP_POINT=${{#COMP_LINE}}; COMPREPLY=(); _phalanx; echo "${{COMPREPLY[*]}}"'
        for line, _ in COMPLETED + VALUES
    )
    found = in_shell("bash", "-c", f"source ./bash; compopt() {{ :; }}; {tries}", cwd=scripts)
    # bash breaks words at =, so that it wants what comes after it alone
    assert found.splitlines() == [*(word for _, word in COMPLETED), *(word.rpartition("=")[2] for _, word in VALUES)]


def test_fish_completes(scripts):
    tries = "\n".join(f'echo (complete -C "{line}" | string split -f1 \\t)' for line, _ in COMPLETED + VALUES)
    found = in_shell("fish", "--no-config", "-c", f"source ./fish\n{tries}", cwd=scripts)
    assert found.splitlines() == [word for _, word in COMPLETED + VALUES]


def test_every_verb_has_its_arguments():
    assert [*words().arguments] == [*VERBS]
    assert {"--json", "--print-config", "--help"} <= {*words().arguments["train"]}
    assert not [verb for verb, found in words().arguments.items() if "--help" not in found]


def test_another_shell_is_refused(capsys):
    assert main(["completion", "zhs"]) == 2
    assert "no command 'zhs'; did you mean `phalanx completion zsh`?" in capsys.readouterr().err
