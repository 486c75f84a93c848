"""A verb's own options with values, beside switches, job files and overrides."""

import pytest

from phalanx.cli.job_words import JobVerb, JobWords, Option
from phalanx.errors import JobError

VERB = JobVerb(
    "test",
    "A verb.",
    {"quick": "Be quick."},
    {
        "steps": Option(int, 2, "Steps.", at_least=1),
        "names": Option(str, (), "Names.", many=True),
    },
)


def parse(*argv: str) -> JobWords:
    words = VERB.parse(argv)
    assert words is not None
    return words


def problems(*argv: str) -> list[str]:
    with pytest.raises(JobError) as caught:
        VERB.parse(argv)
    return caught.value.problems


def test_defaults():
    assert parse().options == {"steps": 2, "names": ()}


@pytest.mark.parametrize(
    ("argv", "options"),
    [
        (["--steps", "3"], {"steps": 3, "names": ()}),
        (["--steps=3", "--quick"], {"steps": 3, "names": ()}),
        (["--steps", "3", "--steps", "1e1"], {"steps": 10, "names": ()}),
        (["--names", "a=1", "b", "--quick"], {"steps": 2, "names": ("a=1", "b")}),
        (["--names", "a", "--names=b=2"], {"steps": 2, "names": ("a", "b=2")}),
    ],
)
def test_every_spelling(argv, options):
    assert parse(*argv).options == options


def test_many_values_end_at_a_job_file_and_at_an_option(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("model: {n_layers: 7}\n")
    words = parse("--names", "a", "b", str(path), "train.steps=5", "--quick")
    assert words.options["names"] == ("a", "b")
    assert (words.job.model.n_layers, words.job.train.steps) == (7, 5)
    assert words.switches == {"quick"}


def test_an_option_wins_over_a_field_with_its_name():
    words = parse("--steps", "9", "--train.steps", "4")
    assert (words.options["steps"], words.job.train.steps) == (9, 4)


def test_mistakes_come_with_those_of_the_job():
    assert problems("--steps", "0", "--names", "--stepz", "4", "d_mode=3") == [
        "--steps: must be at least 1, is 0",
        "--names: needs a value",
        "unknown option --stepz; did you mean --steps?",
        "unknown key d_mode in 'd_mode=3'; did you mean model.d_model?",
    ]
    assert problems("--steps") == ["--steps: needs a value"]
    assert problems("--steps", "x") == ["--steps: expected a whole number, found 'x'"]


def test_the_page_of_help_shows_them(capsys):
    assert VERB.parse(["--help", "--steps", "5"]) is None
    page = capsys.readouterr().out
    assert "--steps INT" in page
    assert "--names [STR" in page
    assert "--quick" in page


def test_the_page_of_help_leaves_out_what_bench_writes(capsys):
    assert VERB.parse(["cluster.peak_tflops=43.5", "--help"]) is None
    page = capsys.readouterr().out
    assert "--cluster.calibration" not in page
    assert "--cluster.allow-unreliable" in page
    assert "(default: 43.5)" in page


def test_help_lists_presets_and_machines(capsys):
    assert VERB.parse(["--help"]) is None
    page = " ".join(capsys.readouterr().out.split())
    assert "`phalanx models` lists the presets of models" in page
    assert "Machines (docs/devices.md): dgx-v100, " in page
