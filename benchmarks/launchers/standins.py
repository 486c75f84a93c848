"""Stand-ins for PBS: a qsub and an mpiexec of PALS that do what their manuals say about a job's environment. They are
no PBS: no server, no queue, no limits.

Sources: PBS Professional User's Guide, "Job environment variables"; `man mpiexec` of Cray PALS, as ALCF's guides quote
it; Slurm's plugin cray_shasta, which sets the same variables.
"""

from __future__ import annotations

from pathlib import Path

_QSUB = """#!/bin/sh
# qsub SCRIPT: the job starts on its first node, in the home directory, with what #PBS -l select= asks for.
job=$$.stand-in
nodes=$(sed -n 's/^#PBS -l select=\\([0-9]*\\).*/\\1/p' "$1")
directory=$(sed -n 's/^#PBS -o //p' "$1")
name=$(sed -n 's/^#PBS -N //p' "$1")
file={folder}/nodes.$job
head -n "${{nodes:-1}}" {hosts} > "$file"
first=$(head -n 1 "$file")
export PBS_JOBID=$job PBS_NODEFILE=$file PBS_O_WORKDIR=$PWD PBS_ENVIRONMENT=PBS_BATCH PBS_JOBNAME=$name
export PBS_O_HOST=$first PBS_QUEUE=stand-in PBS_O_HOME=$HOME PBS_O_PATH=$PATH NCPUS=1
( cd "$HOME" && {remote} "$first" /bin/bash "$1" > "$directory/$job.OU" 2>&1; echo $? > {folder}/$job.code ) &
echo "$job"
"""
_MPIEXEC = """#!{python}
# mpiexec of PALS: -n N --ppn P [--hostfile FILE] [options] COMMAND; ranks by node, with the variables that PALS sets.
import os, shlex, subprocess, sys, uuid

words = sys.argv[1:]
if words == ["--version"]:
    print("mpiexec: Cray PALS, a stand-in")
    sys.exit(0)
found = {{"-n": "1", "--ppn": "", "--hostfile": os.environ.get("PBS_NODEFILE", "")}}
while words[0].startswith("-"):
    flag = words.pop(0)
    if flag in ("-n", "--ppn", "--hostfile", "--cpu-bind", "--depth"):
        found[flag] = words.pop(0)
world = int(found["-n"])
on_node = int(found["--ppn"] or world)
hosts = list(dict.fromkeys(open(found["--hostfile"]).read().split()))
apid = str(uuid.uuid4())
ranks = []
for rank in range(world):
    node, local = divmod(rank, on_node)
    variables = {{
        "PALS_APID": apid, "PALS_RANKID": rank, "PALS_LOCAL_RANKID": local, "PALS_NODEID": node,
        "PMI_RANK": rank, "PMI_SIZE": world, "PMI_LOCAL_RANK": local, "PMI_LOCAL_SIZE": on_node,
    }}
    env = {{**os.environ, **{{name: str(value) for name, value in variables.items()}}}}
    ranks.append(subprocess.Popen(["{remote}", hosts[node], shlex.join(words)], env=env))
codes = [rank.wait() for rank in ranks]
sys.exit(max(128 - code if code < 0 else code for code in codes))
"""


def write(folder: Path, python: str, hosts: Path, remote: Path) -> None:
    """Writes qsub and mpiexec into a folder.

    Args:
        folder: for the programs, and for files of jobs: JOBID.code holds the exit code of a job that has ended.
        python: interpreter of mpiexec.
        hosts: a file with a host per line.
        remote: a program that takes HOST and a command for its shell, as ssh does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("qsub", _QSUB), ("mpiexec", _MPIEXEC)):
        file = folder / name
        file.write_text(text.format(folder=folder, python=python, hosts=hosts, remote=remote), encoding="utf-8")
        file.chmod(0o755)
