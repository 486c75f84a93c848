"""The Python API: its names, the example of every function, and the generated pages of the reference."""

import doctest
import importlib
import re
import subprocess
import sys
from contextlib import nullcontext
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

import phalanx
from generate.written import write_run
from model.kinds import KINDS
from phalanx import api
from phalanx.check.load import load_file
from phalanx.errors import DataError, JobError, RunError
from phalanx.train.run_directory import RunDirectory
from phalanx.verify.cases import CaseReport
from report import written

ROOT = Path(phalanx.__file__).parents[2]
DOCS = ROOT / "docs"
END = {"event": "end", "time": 1e9 + 2, "step": 2, "status": "finished"}


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A current directory with a finished run, and one that has a checkpoint of tensors."""
    written.run(tmp_path / "runs" / "main")
    write_run(tmp_path / "runs" / "small", KINDS["llama"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path / "home"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def as_if_trained(command, **_):
    """Leaves the run that `phalanx train` of the command's job file would."""
    assert command[1:4] == ["-m", "phalanx", "train"]
    job = load_file(Path(command[4])).job
    written.run(RunDirectory.of(job).path, [written.START, *map(written.step, range(1, job.train.steps + 1)), END], job)
    return subprocess.CompletedProcess(command, 0)


@pytest.mark.parametrize("name", ["phalanx.api", *api.__all__])
def test_the_example_works(name, here, monkeypatch, request):
    if name == "train_job":
        monkeypatch.setattr(api.subprocess, "run", as_if_trained)
    if name == "verify_layouts":
        warm = request.getfixturevalue("pool")
        monkeypatch.setattr("phalanx.verify.cases.Pool", lambda *_: nullcontext(warm))
    described = api if name == "phalanx.api" else getattr(api, name)
    (test,) = doctest.DocTestFinder(recurse=False).find(described, name, globs={**vars(api)})
    assert test.examples
    said: list[str] = []
    doctest.DocTestRunner().run(test, out=said.append)
    assert not said, "".join(said)


@pytest.mark.skipif(not DOCS.exists(), reason="the package is installed without its documents")
@pytest.mark.parametrize("name", ["api", "cli"])
def test_the_page_is_current(name, monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    made = importlib.import_module(f"{name}_reference").page()
    assert (DOCS / "reference" / f"{name}.md").read_text(encoding="utf-8") == made, "write it again: make reference"


def test_the_package_offers_the_functions_and_a_type_checker_knows_them():
    assert {*api.__all__} <= {*dir(phalanx)}
    assert phalanx.load_job is api.load_job
    stub = Path(api.__file__).with_name("__init__.pyi").read_text(encoding="utf-8")
    assert sorted(re.findall(r" as (\w+)", stub)) == api.__all__
    with pytest.raises(AttributeError, match="no attribute 'lode_job'"):
        phalanx.lode_job  # noqa: B018


def test_importing_the_package_imports_next_to_nothing():
    code = "import importlib, sys; before = {*sys.modules}; import phalanx; print(*({*sys.modules} - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["phalanx"]


def test_an_open_layout_is_not_predicted():
    job = phalanx.load_job("model=tiny", "vocab_size=64", "cluster=dgx-h100", "layout=auto")
    for function in (phalanx.predict_step, phalanx.predict_traffic, phalanx.simulate_step):
        with pytest.raises(JobError, match="layout: auto leaves the layout open"):
            function(job)


def test_a_straggler_that_is_no_rank_is_refused():
    job = phalanx.load_job("model=tiny", "vocab_size=64", "cluster=dgx-h100", "layout=dp_shard=8", "global_batch=8")
    with pytest.raises(JobError, match="rank 0 alone"):
        phalanx.simulate_step(job, stragglers={3: 2.0})


def test_a_training_that_fails_has_the_exit_code_of_the_verb(here, monkeypatch):
    monkeypatch.setattr(api.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 75))
    with pytest.raises(RunError, match="exit code 75: its message is above") as caught:
        phalanx.train_job(phalanx.load_job("model=tiny", "run.name=stopped"))
    assert caught.value.exit_code == 75


def test_what_is_no_run_is_refused(here):
    with pytest.raises(DataError, match="no run in nowhere"):
        phalanx.read_run("nowhere")


class Frames(HTMLParser):
    """Reads what a notebook gets: one frame, whose page is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.found = list[tuple[str, dict[str, str | None]]]()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def shown(result) -> str:
    """Returns the page of an object in a notebook."""
    frames = Frames()
    frames.feed(result._repr_html_())
    [(tag, attributes)] = frames.found
    assert (tag, attributes["sandbox"]) == ("iframe", "allow-scripts")
    page = attributes["srcdoc"]
    assert page
    assert page.startswith("<!doctype html>")
    assert page.endswith("</html>\n")
    return page


def test_a_notebook_shows_what_the_functions_return(here):
    words = ["model=llama3-8b", "cluster=dgx-h100", "precision=bf16", "global_batch=16"]
    job = api.load_job(*words, "layout=dp_shard=4,tp=2,recompute=full")
    assert "The best layouts" in shown(api.plan_layout(job, fixed={"pp": 1, "tp": 2, "cp": 1}))
    predicted = shown(api.predict_step(job))
    assert "of 79.1GiB: fits" in predicted
    assert "Time of a step" in predicted
    assert "One step, simulated" in shown(api.simulate_step(job))
    assert "<title>Run main</title>" in shown(api.read_run("runs/main"))


def test_a_notebook_shows_a_verification_and_escapes_what_failed():
    class Report(CaseReport):
        def rows(self):
            yield "layout", "ranks"
            yield "tp=<b>2</b>", "2"

        def verdict(self, failed, how_many):
            return f"Not equal: {how_many}"

    case = SimpleNamespace(ok=False, seconds=1.0, title="tp=2", complaint=lambda: "'</iframe><script>alert(1)</script>")
    page = shown(Report(SimpleNamespace(not_compared=list), 2, [case]))
    assert "Not equal: 1 of 1 layout" in page
    assert "tp=&lt;b&gt;2&lt;/b&gt;" in page
    assert "&#x27;&lt;/iframe&gt;&lt;script&gt;alert(1)" in page
    assert "alert(1)</script>" not in page
