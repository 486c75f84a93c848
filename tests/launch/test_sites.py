"""Files of sites: those of the package, and a user's own."""

from pathlib import Path

import pytest

from phalanx.errors import JobError
from phalanx.launch.sites.site import chosen, known, parse

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
