"""New files and folders: written beside their place, in folders that are made, and gone if something fails."""

import contextlib
import os
import signal

import pytest

from phalanx.checkpoint.new_target import target_problems, written_beside
from phalanx.errors import RunError


def test_folders_above_the_target_are_made(tmp_path):
    target = tmp_path / "runs" / "of" / "mine"
    assert not list(target_problems(target))
    with written_beside(target, 10) as new:
        (new.directory / "file").write_text("x")
    assert [path.name for path in target.iterdir()] == ["file"]
    assert [path.name for path in target.parent.iterdir()] == ["mine"]


def test_a_failure_leaves_none_of_them(tmp_path):
    target = tmp_path / "runs" / "of" / "mine"
    with pytest.raises(RuntimeError), written_beside(target, 10):
        raise RuntimeError
    with (
        pytest.raises(RunError, match=r"of/mine could not be written: it needs .* has .* free"),
        written_beside(target, 2**70),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_a_file_among_the_folders_is_named(tmp_path):
    (tmp_path / "runs").write_text("")
    [problem] = target_problems(tmp_path / "runs" / "of" / "mine")
    assert problem.endswith(f"{tmp_path}/runs is no folder; name another target")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing(number, tmp_path):
    def interrupted():
        with written_beside(tmp_path / "run", 10) as new:
            (new.directory / "file").write_text("x")
            os.kill(os.getpid(), number)

    with pytest.raises(SystemExit) as error:
        interrupted()
    assert error.value.code == 128 + number
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(number) is signal.SIG_DFL


def test_what_a_killed_process_left_is_removed_and_what_another_one_writes_is_not(tmp_path):
    abandoned = tmp_path / ".run.tmp-0123"
    with written_beside(tmp_path / "run", 10) as first:
        abandoned.mkdir()
        with written_beside(tmp_path / "other", 10):
            assert len(list(tmp_path.iterdir())) == 3  # of another target
        (tmp_path / "other").rmdir()
        with contextlib.suppress(ZeroDivisionError), written_beside(tmp_path / "run", 10) as second:
            assert sorted(tmp_path.iterdir()) == sorted([first.directory, second.directory])
            raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
