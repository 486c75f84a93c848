"""Batch scripts of Slurm and PBS: their directives by the schedulers' grammar, their shell lines by bash."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import JobError
from phalanx.launch.exported import Exported
from phalanx.launch.grid import ProcessGrid
from phalanx.launch.sites.site import GENERIC, known
from phalanx.launch.submit.script import SubmitRequest, clock, parse_time, pbs_submission, plain_name, slurm_submission

SITES = known({"XDG_CONFIG_HOME": "/nowhere"})
REQUEST = SubmitRequest(
    name="try",
    words=("job.yaml", "--nnodes=2"),
    python="/venv/bin/python",
    folder="/work",
    directory=Path("/data/runs/try"),
    grid=ProcessGrid(2, 4, 2),
    ranks_by="phalanx",
    site=GENERIC["slurm"],
    exported=Exported({"NCCL_DEBUG": "INFO"}, ("HF_TOKEN",)),
    time_s=5400,
    signal_s=120,
    requeue=True,
    account="me",
)
TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=40)


def slurm_options(text: str) -> dict[str, str]:
    """Returns the options of #SBATCH lines as sbatch reads them: quotes as a shell has them, and # begins a comment
    outside of them. What it does with a backslash depends on the place, so that there must be none."""
    found = {}
    for line in text.splitlines():
        if line.startswith("#SBATCH "):
            assert "\\" not in line
            (word,) = shlex.split(line.removeprefix("#SBATCH "), comments=True)
            name, _, value = word.partition("=")
            found[name] = value
    return found


def body(text: str) -> list[str]:
    """Returns the lines that bash runs."""
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_the_script_of_slurm():
    text = slurm_submission(REQUEST).text
    assert text.splitlines()[0] == "#!/bin/bash -l"
    assert slurm_options(text) == {
        "--job-name": "try",
        "--nodes": "2",
        "--ntasks-per-node": "1",
        "--time": "01:30:00",
        "--chdir": "/work",
        "--output": "/data/runs/try/slurm-%j.out",
        "--open-mode": "append",
        "--requeue": "",
        "--account": "me",
        "--export": "HOME,LANG,LOGNAME,PATH,SHELL,USER,HF_TOKEN",
        "--signal": "USR1@120",
        "--cpus-per-task": "4",
    }
    assert body(text) == [
        "export NCCL_DEBUG=INFO",
        "code=0",
        "/venv/bin/python -P -m phalanx launch job.yaml --nnodes=2 || code=$?",
        'if [ "$code" -eq 75 ]; then',
        '    scontrol requeue "$SLURM_JOB_ID" && sleep 60  # Slurm ends this shell meanwhile',
        "fi",
        'exit "$code"',
    ]


def test_slurm_gives_gpu_ranks_the_cores_and_memory_of_their_node():
    gpus = replace(REQUEST, devices=4)
    found = slurm_options(slurm_submission(gpus).text)
    assert found | {"--exclusive": "", "--mem": "0", "--gpus-per-node": "4"} == found
    shared = slurm_options(slurm_submission(replace(gpus, options=("--mem-per-cpu=4G", "--exclusive=user"))).text)
    assert shared["--exclusive"] == "user"
    assert "--mem" not in shared
    own = replace(gpus, site=replace(SITES["perlmutter"], exclusive=False, directives=[]))
    found = slurm_options(slurm_submission(own).text)
    assert found["--cpus-per-task"] == "128"
    assert "--exclusive" not in found


def test_sites_and_options_of_slurm():
    site = replace(REQUEST, site=SITES["perlmutter"], devices=4, options=("--mail-type=END",), requeue=False)
    found = slurm_options(slurm_submission(site).text)
    assert found | {"--qos": "regular", "--constraint": "gpu", "--gpus-per-node": "4", "--mail-type": "END"} == found
    assert "--no-requeue" in found
    assert "module load pytorch" in slurm_submission(site).text
    shrinks = replace(REQUEST, grid=ProcessGrid(2, 4, 1), ranks_by="launcher", queue="fast", signal_s=0)
    found = slurm_options(slurm_submission(shrinks).text)
    assert found | {"--no-kill": "", "--ntasks-per-node": "4", "--partition": "fast"} == found
    assert "--signal" not in found


@settings(max_examples=300)
@given(TEXTS, TEXTS)
def test_any_folder_and_word_survives_slurm_and_bash_or_is_refused(folder, word):
    request = replace(REQUEST, folder=f"/{folder}", directory=Path(f"/{folder}/runs"), words=(word,))
    request = replace(request, exported=Exported({"A": word}))
    try:
        text = slurm_submission(request).text
    except JobError as error:
        assert "\\" in folder or not folder.isprintable()
        assert "cannot stand in a script" in str(error)
        return
    found = slurm_options(text)
    assert found["--chdir"] == f"/{folder}"
    assert (
        found["--output"].replace("%%", "\0").replace("%j", "J").replace("\0", "%")
        == f"{request.directory}/slurm-J.out"
    )
    lines = body(text)
    assert shlex.split(lines[0]) == ["export", f"A={word}"]
    assert shlex.split(lines[2])[:6] == ["/venv/bin/python", "-P", "-m", "phalanx", "launch", word]


QSUB = {
    "-A": r"[A-Za-z0-9._-]+",
    "-N": r"[A-Za-z0-9_+][A-Za-z0-9_.+-]{0,229}",
    "-j": "oe|eo|n",
    "-k": r"[oed]+",
    "-l": r"select=[0-9]+(:[a-z_]+=[A-Za-z0-9_]+)*|place=(free|pack|scatter|vscatter)"
    r"|walltime=[0-9]{2,}:[0-9]{2}:[0-9]{2}|filesystems=[a-z_]+(:[a-z_]+)*",
    "-o": r"(/[A-Za-z0-9._+-]+)+/?",
    "-q": r"[A-Za-z0-9._-]+",
    "-r": "y|n",
    "-v": r"[A-Za-z_][A-Za-z0-9_]*(,[A-Za-z_][A-Za-z0-9_]*)*",
}
"""The options of qsub that scripts use, each with the form of its value (PBS Professional Reference Guide, qsub)."""


def pbs_options(text: str) -> list[tuple[str, str]]:
    """Returns the options of #PBS lines. They end at the first line of the shell."""
    lines = text.splitlines()
    shell = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert not [line for line in lines[shell:] if line.startswith("#PBS")]
    words = [line.split() for line in lines[:shell] if line.startswith("#PBS")]
    assert all(len(each) == 3 for each in words)
    for _, option, value in words:
        assert re.fullmatch(QSUB[option], value), (option, value)
    return [(option, value) for _, option, value in words]


@pytest.mark.parametrize("site", ["pbs", "polaris", "aurora", "sophia"])
def test_the_script_of_pbs_by_the_grammar_of_qsub(site):
    text = pbs_submission(replace(REQUEST, site=SITES[site])).text
    found = pbs_options(text)
    resources = [value.partition("=")[0] for option, value in found if option == "-l"]
    assert sorted(resources) == sorted(set(resources))
    assert {"select", "walltime", "place"} <= set(resources)
    assert {("-N", "try"), ("-A", "me"), ("-r", "y"), ("-j", "oe"), ("-v", "HF_TOKEN")} <= set(found)
    assert "    qsub /data/runs/try/submit.pbs" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


@pytest.mark.parametrize("word", ["a b", "a;b", "$(id)", "a'b"])
def test_accounts_and_queues_are_plain_words(word):
    with pytest.raises(JobError) as caught:
        slurm_submission(replace(REQUEST, account=word, queue=word))
    assert [problem.split()[0] for problem in caught.value.problems] == ["--account", "--queue"]


def test_pbs_refuses_paths_that_its_directives_cannot_hold():
    with pytest.raises(JobError, match="cannot stand in a script of PBS"):
        pbs_submission(replace(REQUEST, site=GENERIC["pbs"], directory=Path("/a b")))


@given(TEXTS)
def test_any_name_becomes_the_name_of_a_job(name):
    assert re.fullmatch(QSUB["-N"], plain_name(name))


def test_folders_are_put_first_whether_the_variable_is_set_or_not():
    text = pbs_submission(replace(REQUEST, site=SITES["polaris"], exported=Exported({}))).text
    line = next(line for line in text.splitlines() if line.startswith("export LD_LIBRARY_PATH"))
    folders = SITES["polaris"].prepend["LD_LIBRARY_PATH"]
    for before, after in (("", folders), ("/x", f"{folders}:/x")):
        env = {"LD_LIBRARY_PATH": before} if before else {}
        shown = subprocess.run(
            ["/bin/bash", "-c", f'{line}; printf %s "$LD_LIBRARY_PATH"'], env=env, capture_output=True, check=True
        )
        assert shown.stdout.decode() == after


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1:30:00", 5400), ("30:00", 1800), ("2-00:00:00", 172800), ("90m", 5400), ("1h30m", 5400), ("1d", 86400)],
)
def test_time_limits(text, seconds):
    assert parse_time(text) == seconds
    assert parse_time(clock(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "90", "0m", "1:2:3:4", "-1h", "1h 30m", "soon"])
def test_what_is_no_time_limit(text):
    with pytest.raises(JobError, match="expected a time limit"):
        parse_time(text)


@pytest.mark.skipif(
    shutil.which("sbatch") is None or "SLURM_CONF" not in os.environ, reason="no Slurm: set SLURM_CONF of a running one"
)
@pytest.mark.parametrize("folder", ["plain", "a b'c\"d", "100% #1, ä=x"])
def test_sbatch_takes_the_script(tmp_path, folder):
    directory = tmp_path / folder
    directory.mkdir()
    request = replace(REQUEST, folder=str(directory), directory=directory, grid=ProcessGrid(1, 1, 1), requeue=False)
    file = directory / "submit.sbatch"
    file.write_text(slurm_submission(replace(request, python="/bin/echo")).text)
    done = subprocess.run(["sbatch", "--test-only", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
