"""Batch scripts, manifests, files of sites, and the commands that start a job."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import JobError
from phalanx.launch.exported import Exported
from phalanx.launch.grid import ProcessGrid
from phalanx.launch.hosts import HostSlots
from phalanx.launch.site import GENERIC, chosen, known, parse
from phalanx.launch.start import PORTS, LaunchPlace, StartRequest, commands_of, flavor_of, launcher_for, port_for
from phalanx.launch.submit import (
    ManifestRequest,
    SubmitRequest,
    batch_submission,
    clock,
    manifest,
    parse_time,
    plain_name,
)

# Batch scripts of Slurm and PBS: their directives by the schedulers' grammar, their shell lines by bash.


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
    text = batch_submission(REQUEST).text
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
    found = slurm_options(batch_submission(gpus).text)
    assert found | {"--exclusive": "", "--mem": "0", "--gpus-per-node": "4"} == found
    shared = slurm_options(batch_submission(replace(gpus, options=("--mem-per-cpu=4G", "--exclusive=user"))).text)
    assert shared["--exclusive"] == "user"
    assert "--mem" not in shared
    own = replace(gpus, site=replace(SITES["perlmutter"], exclusive=False, directives=[]))
    found = slurm_options(batch_submission(own).text)
    assert found["--cpus-per-task"] == "128"
    assert "--exclusive" not in found


def test_sites_and_options_of_slurm():
    site = replace(REQUEST, site=SITES["perlmutter"], devices=4, options=("--mail-type=END",), requeue=False)
    found = slurm_options(batch_submission(site).text)
    assert found | {"--qos": "regular", "--constraint": "gpu", "--gpus-per-node": "4", "--mail-type": "END"} == found
    assert "--no-requeue" in found
    assert "module load pytorch" in batch_submission(site).text
    shrinks = replace(REQUEST, grid=ProcessGrid(2, 4, 1), ranks_by="launcher", queue="fast", signal_s=0)
    found = slurm_options(batch_submission(shrinks).text)
    assert found | {"--no-kill": "", "--ntasks-per-node": "4", "--partition": "fast"} == found
    assert "--signal" not in found


@settings(max_examples=300)
@given(TEXTS, TEXTS)
def test_any_folder_and_word_survives_slurm_and_bash_or_is_refused(folder, word):
    request = replace(REQUEST, folder=f"/{folder}", directory=Path(f"/{folder}/runs"), words=(word,))
    request = replace(request, exported=Exported({"A": word}))
    try:
        text = batch_submission(request).text
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
    text = batch_submission(replace(REQUEST, site=SITES[site])).text
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
        batch_submission(replace(REQUEST, account=word, queue=word))
    assert [problem.split()[0] for problem in caught.value.problems] == ["--account", "--queue"]


def test_pbs_refuses_paths_that_its_directives_cannot_hold():
    with pytest.raises(JobError, match="cannot stand in a script of PBS"):
        batch_submission(replace(REQUEST, site=GENERIC["pbs"], directory=Path("/a b")))


@given(TEXTS)
def test_any_name_becomes_the_name_of_a_job(name):
    assert re.fullmatch(QSUB["-N"], plain_name(name))


def test_folders_are_put_first_whether_the_variable_is_set_or_not():
    text = batch_submission(replace(REQUEST, site=SITES["polaris"], exported=Exported({}))).text
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
    [
        ("1:30:00", 5400),
        ("30:00", 1800),
        ("2-00:00:00", 172800),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("90m", 5400),
        ("1h30m", 5400),
        ("1d", 86400),
    ],
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
    file.write_text(batch_submission(replace(request, python="/bin/echo")).text)
    done = subprocess.run(["sbatch", "--test-only", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# Manifests of Kubernetes against its schemas, and those of JobSet and Kubeflow against their models.

IN_KUBERNETES = ManifestRequest(
    name="My run_1",
    job_yaml="run:\n  name: 'My run_1'  # a comment\n",
    grid=ProcessGrid(2, 4, 1),
    values={"NCCL_DEBUG": "INFO", "ODD": "a: b #c"},
    secrets=("HF_TOKEN",),
    secret="tokens",
    image="registry.example.org/phalanx:1",
    claim="runs",
    namespace="team",
    devices=4,
    time_s=3600,
    grace_s=90,
)
KINDS = ("job", "jobset", "trainjob")


def documents(request: ManifestRequest, kind: Any) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(manifest(request, kind)))


def pod_of(document: dict[str, Any]) -> dict[str, Any]:
    spec = document["spec"]
    return (
        spec["template"] if document["kind"] == "Job" else spec["replicatedJobs"][0]["template"]["spec"]["template"]
    )["spec"]


def job_of(jobset: dict[str, Any]) -> dict[str, Any]:
    """Returns the Job that the controller of a JobSet makes."""
    template = jobset["spec"]["replicatedJobs"][0]["template"]
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **template}


@pytest.mark.parametrize("kind", ["job", "jobset"])
@pytest.mark.parametrize("devices", [0, 4])
def test_kubernetes_takes_it(kind, devices):
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for document in documents(replace(IN_KUBERNETES, devices=devices), kind):
        known = job_of(document) if document["kind"] == "JobSet" else document
        validate.validate(known, validate.latest_version(), strict=True)


def test_strict_validation_finds_an_unknown_key():
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    job = documents(IN_KUBERNETES, "job")[-1]
    job["spec"]["completionsMode"] = "Indexed"
    with pytest.raises(validate.ValidationError):
        validate.validate(job, validate.latest_version(), strict=True)


@pytest.mark.parametrize(
    ("kind", "model"), [("jobset", "JobsetV1alpha2JobSet"), ("trainjob", "TrainerV1alpha1TrainJob")]
)
def test_the_models_of_kubeflow_lose_nothing(kind, model):
    """The models ignore keys that they do not know: what comes back must be what was given."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
    document = documents(IN_KUBERNETES, kind)[-1]
    assert getattr(models, model).from_dict(document).to_dict() == document


def test_an_indexed_job_meets_through_its_service():
    config, service, job = documents(IN_KUBERNETES, "job")
    assert [each["kind"] for each in (config, service, job)] == ["ConfigMap", "Service", "Job"]
    assert {each["metadata"]["namespace"] for each in (config, service, job)} == {"team"}
    spec, pod = job["spec"], pod_of(job)
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"] == "my-run-1"
    command = pod["containers"][0]["command"]
    assert command[:5] == ["python3", "-P", "-m", "phalanx.cli.node", "--await-host=600"]
    port = service["spec"]["ports"][0]["port"]
    assert command[-3:] == ["/etc/phalanx/job.yaml", "run.nnodes=1:2", f"run.rdzv_endpoint=my-run-1-0.my-run-1:{port}"]
    assert config["data"]["job.yaml"] == IN_KUBERNETES.job_yaml
    assert pod["volumes"][0]["configMap"]["name"] == config["metadata"]["name"]
    assert pod["terminationGracePeriodSeconds"] == 120
    assert pod["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 4}}
    rules = spec["podFailurePolicy"]["rules"]
    assert [(rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in rules] == [
        ("FailJob", [2, 3, 4, 5]),
        ("Ignore", [75]),
        ("Ignore", None),
    ]


def test_jobsets_and_train_jobs_meet_at_their_first_pod():
    for kind in ("jobset", "trainjob"):
        text = manifest(IN_KUBERNETES, kind)
        assert "run.rdzv_endpoint=my-run-1-node-0-0.my-run-1:" in text


@pytest.mark.parametrize("kind", KINDS)
def test_secrets_come_from_a_secret(kind):
    assert "secretKeyRef" in manifest(IN_KUBERNETES, kind)
    with pytest.raises(JobError, match="kubectl create secret generic"):
        manifest(replace(IN_KUBERNETES, secret=""), kind)


def test_everything_that_is_missing_at_once():
    with pytest.raises(JobError) as caught:
        manifest(replace(IN_KUBERNETES, image="", claim="", namespace="No_Name", mount="runs"), "job")
    assert [problem.split()[0].rstrip(":") for problem in caught.value.problems] == [
        *("--image", "--namespace", "--pvc", "--pvc")
    ]


@settings(max_examples=50)
@given(st.text(min_size=1, max_size=200), st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=50))
def test_any_name_and_value_survives(name, value):
    request = replace(IN_KUBERNETES, name=name, values={"A": value}, job_yaml=f"x: {value}\ny: 1\n")
    config, service, job = documents(request, "job")
    assert pod_of(job)["containers"][0]["env"][0] == {"name": "A", "value": value}
    assert config["data"]["job.yaml"] == request.job_yaml
    assert service["metadata"]["name"] == request.resource
    assert len(request.resource) <= 44
    assert request.resource.strip("-").replace("-", "").isalnum()


# Files of sites: those of the package, and a user's own.

NAMES = {"slurm", "pbs", "polaris", "aurora", "sophia", "perlmutter", "frontier"}


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(tmp_path)}


def test_the_packages_sites_are_valid_and_have_a_source(env):
    sites = known(env)
    assert set(sites) == NAMES
    assert all("https://" in site.source for name, site in sites.items() if name not in ("slurm", "pbs"))


@pytest.mark.parametrize(
    ("host", "variables", "site"),
    [
        ("polaris-login-02.hsn.cm.polaris.alcf.anl.gov", {}, "polaris"),
        ("x3004c0s7b0n0", {}, "polaris"),
        ("x3208c0s37b1n0.hsn.cm.polaris.alcf.anl.gov", {}, "polaris"),
        ("x4102c5s2b0n0", {}, "aurora"),
        ("aurora-uan-0010", {}, "aurora"),
        ("sophia-gpu-03", {}, "sophia"),
        ("nid001234", {"NERSC_HOST": "perlmutter"}, "perlmutter"),
        ("frontier01234", {}, "frontier"),
        ("login10", {"LMOD_SYSTEM_NAME": "frontier"}, "frontier"),
        ("laptop", {}, None),
        ("nid001234", {}, None),
    ],
)
def test_a_site_is_recognised(env, host, variables, site):
    found = chosen("", {**env, **variables}, host)
    assert (found.name if found else None) == site


def test_a_users_own_site_wins(env, tmp_path):
    folder = tmp_path / "phalanx" / "sites"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("name: polaris\nscheduler: slurm\nhosts: [laptop]\n")
    found = chosen("", env, "laptop")
    assert found is not None
    assert (found.name, found.scheduler) == ("polaris", "slurm")
    assert found.queue == ""


def test_a_file_and_a_name(env, tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("name: x\nscheduler: pbs\ndevices: 4\naccount_required: true\nenvironment: {NCCL_DEBUG: INFO}\n")
    site = chosen(str(path), env, "h")
    assert site is not None
    assert (site.devices, site.account_required, site.environment) == (4, True, {"NCCL_DEBUG": "INFO"})
    with pytest.raises(JobError, match=r"no such site; did you mean polaris\?"):
        chosen("polarys", env, "h")
    with pytest.raises(JobError, match="cannot be read"):
        chosen(str(tmp_path / "absent.yaml"), env, "h")


def test_all_problems_of_a_file_at_once():
    text = """\
schedular: slurm
devices: many
launcher: sruns
modules: [conda, "; rm -rf /"]
environment: {HF_TOKEN: x}
hosts: ["(a+)+"]
filesystems: home
directives: ["$(id)"]
prepend: {"A B": /x}
devices: 4
"""
    with pytest.raises(JobError) as caught:
        parse(text, "x.yaml")
    starts = [problem.partition(": ")[0] for problem in caught.value.problems]
    assert starts == [*(f"x.yaml:{line}" for line in range(1, 11)), "x.yaml", "x.yaml"]
    shown = str(caught.value)
    assert "unknown field schedular; did you mean scheduler?" in shown
    assert "did you mean srun?" in shown
    assert "name is missing" in shown


@pytest.mark.parametrize(
    "text",
    [
        "name: !!python/object/apply:os.system [id]\nscheduler: slurm\n",
        "a: &x [1]\nname: *x\n",
        "name: {a: {b: {c: 1}}}\n",
        "[1, 2]",
        "name: [",
        "",
        "\x00",
        "name: x\nscheduler: slurm\nenvironment: {A: [1]}\n",
    ],
)
def test_hostile_files_are_refused(text):
    with pytest.raises(JobError):
        parse(text, "x.yaml")


# The commands that start a job.

STARTED = StartRequest(
    words=("job.yaml", "train.steps=5"),
    grid=ProcessGrid(2, 4, 2),
    hosts=("n1", "n2"),
    endpoint=("n1", 12345),
    ranks_by="phalanx",
    exported=Exported({"NCCL_DEBUG": "INFO"}, ("HF_TOKEN",)),
    python="/venv/bin/python",
    folder="/work dir",
    job_id="77",
    remote_shell=("ssh",),
)
NODE = "/venv/bin/python -P -m phalanx.cli.node job.yaml train.steps=5 run.nnodes=2 run.rdzv_endpoint=n1:12345"


def test_srun_starts_one_launcher_per_node():
    assert commands_of("srun", STARTED)[0].shell == (
        "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --nodelist=n1,n2 --export=ALL --input=none "
        f"--cpu-bind=none --kill-on-bad-exit=0 --wait=60 {NODE}"
    )


def test_srun_goes_on_when_a_node_fails_if_the_run_does():
    words = commands_of("srun", replace(STARTED, grid=ProcessGrid(2, 4, 1)))[0].argv
    assert {"--no-kill", "--wait=0", "run.nnodes=1:2"} <= set(words)


def test_srun_starts_every_rank():
    request = replace(STARTED, ranks_by="launcher", cpu_bind="cores", cpus_per_rank=8, devices=4, in_step=True)
    words = commands_of("srun", request)[0].argv
    assert words[-6:] == ("-P", "-m", "phalanx", "train", "job.yaml", "train.steps=5")
    assert {"--ntasks=8", "--ntasks-per-node=4", "--cpu-bind=cores", "--cpus-per-task=8"} <= set(words)
    assert {"--gpu-bind=none", "--overlap"} <= set(words)


def test_torchrun_on_every_node():
    words = commands_of("srun", replace(STARTED, ranks_by="torchrun", grace_s=110))[0].shell
    assert words.endswith(
        "-m torch.distributed.run --nnodes 2 --nproc-per-node 4 --signals-to-handle "
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout 110 --rdzv-backend c10d --rdzv-endpoint n1:12345 "
        "--rdzv-id 77 -m phalanx train job.yaml train.steps=5"
    )
    alone = replace(STARTED, ranks_by="torchrun", grid=ProcessGrid(1, 4, 1), endpoint=None)
    assert "--standalone --nproc-per-node 4 --signals-to-handle" in commands_of("local", alone)[0].shell


@pytest.mark.parametrize(
    ("ranks_by", "launcher", "expected"),
    [
        ("phalanx", "pals", f"mpiexec -n 2 --ppn 1 --envall --line-buffer --cpu-bind none {NODE}"),
        (
            "phalanx",
            "openmpi",
            f"mpirun -n 2 --host n1:1,n2:1 --map-by ppr:1:node --bind-to none -x HF_TOKEN -x NCCL_DEBUG {NODE}",
        ),
        (
            "phalanx",
            "mpich",
            "mpiexec -n 2 -ppn 1 -hosts n1,n2 -bind-to none -genvlist "
            f"HF_TOKEN,HOME,LANG,LOGNAME,NCCL_DEBUG,PATH,SHELL,USER,VIRTUAL_ENV {NODE}",
        ),
        (
            "launcher",
            "pals",
            "mpiexec -n 8 --ppn 4 --envall --line-buffer --cpu-bind none "
            "/venv/bin/python -P -m phalanx train job.yaml train.steps=5",
        ),
    ],
)
def test_mpi(ranks_by, launcher, expected):
    (command,) = commands_of(launcher, replace(STARTED, ranks_by=ranks_by))
    assert command.shell == expected


def test_options_of_the_user_stand_before_the_program():
    words = commands_of("pals", replace(STARTED, extra=("--verbose",)))[0].argv
    assert words.index("--verbose") < words.index("/venv/bin/python")


@pytest.mark.parametrize(
    ("version", "flavor"),
    [
        ("mpirun (Open MPI) 4.1.4\n", "openmpi"),
        ("mpiexec (OpenRTE) 4.1.4\n", "openmpi"),
        ("HYDRA build details:\n    Version: 4.0.2\n", "mpich"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9\n", "mpich"),
        ("mpiexec version 1.2.12, PALS\n", "pals"),
    ],
)
def test_the_flavor_of_mpiexec(version, flavor):
    assert flavor_of(version) == flavor


def test_an_unknown_mpiexec():
    with pytest.raises(JobError, match="give --launcher pals, openmpi or mpich"):
        flavor_of("srun 1.0")


def test_remote_shells_get_one_word_for_the_hosts_shell():
    first, second = commands_of("ssh", STARTED)
    assert first.argv[:2] == ("ssh", "n1")
    assert second.argv[:2] == ("ssh", "n2")
    assert first.argv[2] == (
        "cd '/work dir' && exec env NCCL_DEBUG=INFO /venv/bin/python -P -m phalanx.cli.node --controlled=variables "
        "job.yaml train.steps=5 run.nnodes=2 run.rdzv_endpoint=n1:12345"
    )
    assert first.stdin == "one line of JSON with HF_TOKEN, then signals"


@given(st.lists(st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"])), min_size=1, max_size=5))
def test_words_survive_two_shells(words):
    request = replace(STARTED, words=tuple(words), exported=Exported({"A": words[0]}))
    (command,) = commands_of("ssh", replace(request, hosts=("n1",), grid=ProcessGrid(1, 4, 1)))
    outer = shlex.split(command.shell)
    assert tuple(outer) == command.argv
    inner = shlex.split(outer[-1])
    assert inner[inner.index("--controlled") + 1 :][: len(words)] == words
    assert f"A={words[0]}" in inner


@pytest.mark.parametrize(
    ("launcher", "change", "message"),
    [
        ("local", {}, "--launcher local is one host, but the job has 2 nodes"),
        ("ssh", {"extra": ("--x",)}, "words after -- are for srun or mpiexec"),
        ("ssh", {"ranks_by": "launcher"}, "needs srun or mpiexec"),
        ("ssh", {"hosts": ()}, "needs hosts"),
        ("srun", {"ranks_by": "torchrun", "stop_after_s": 5}, "--stop-after needs Phalanx launchers"),
    ],
)
def test_what_a_launcher_cannot_do(launcher, change, message):
    with pytest.raises(JobError, match=message):
        commands_of(launcher, replace(STARTED, **change))


SLURM, PBS = (
    LaunchPlace("slurm job", "1", (HostSlots("a"), HostSlots("b"))),
    LaunchPlace("pbs job", "1", (HostSlots("a"),)),
)


@pytest.mark.parametrize(
    ("place", "nodes", "hosts_given", "site", "version", "launcher"),
    [
        (SLURM, 1, False, "", "", "srun"),
        (PBS, 2, False, "polaris", "", "pals"),
        (PBS, 2, False, "", "mpirun (Open MPI) 5.0", "openmpi"),
        (PBS, 1, False, "", "", "local"),
        (LaunchPlace("host"), 1, False, "", "", "local"),
        (LaunchPlace("host"), 2, True, "", "", "ssh"),
    ],
)
def test_the_launcher_of_a_place(place, nodes, hosts_given, site, version, launcher):
    chosen = known({"XDG_CONFIG_HOME": "/nowhere"}).get(site)
    found = launcher_for(place, nodes=nodes, wanted=None, hosts_given=hosts_given, site=chosen, version=lambda: version)
    assert found == launcher


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (LaunchPlace("slurm login node"), "--submit slurm.*salloc.*--launcher local"),
        (LaunchPlace("pbs login node"), "--submit pbs.*qsub -I"),
        (LaunchPlace("pod"), "--submit k8s"),
        (LaunchPlace("host"), "--hostfile FILE"),
        (PBS, "no mpiexec: load its module"),
    ],
)
def test_where_nothing_can_start_the_job_the_message_names_the_ways(place, message):
    with pytest.raises(JobError, match=message):
        launcher_for(place, nodes=2, wanted=None, hosts_given=False, site=None, version=lambda: "")


@given(st.text(), st.integers(0, 30000), st.integers(0, 30000))
def test_a_port_is_legal_and_the_same_for_the_same_key(key, first, count):
    ephemeral = range(first, first + count)
    port = port_for(key, ephemeral)
    assert port in PORTS
    assert port not in ephemeral or all(each in ephemeral for each in PORTS)
    assert port == port_for(key, ephemeral)


def test_jobs_that_follow_each_other_have_different_ports():
    ports = {port_for(f"{job}.0") for job in range(1000)}
    assert len(ports) > 950
