"""A verb's own options with values, beside switches, job files and overrides."""

import pytest

from phalanx.cli.option import Option
from phalanx.cli.verb import Words, job_verb
from phalanx.errors import JobError

VERB = job_verb(
    "test",
    "A verb.",
    (("test job.yaml", "a test"), ("test --quick", "a quick one")),
    {"quick": "Be quick."},
    {
        "steps": Option(int, 2, "Steps.", at_least=1),
        "names": Option(str, (), "Names.", many=True),
    },
)


def parse(*argv: str) -> Words:
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
        (["--steps", "10", "--steps", "1e1"], {"steps": 10, "names": ()}),
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


def page(capsys, *argv: str) -> str:
    assert VERB.parse(argv) is None
    return capsys.readouterr().out


def test_the_page_of_help_is_short_and_shows_the_verb_s_own_options(capsys):
    found = page(capsys, "--help", "--steps", "5")
    assert "--steps N" in found
    assert "--names TEXT ..." in found
    assert "--quick" in found
    assert "--layout.tp" not in found
    assert len(found.splitlines()) < 40


def test_help_explains_a_section_or_a_field_with_the_job_s_values(capsys):
    found = page(capsys, "cluster.peak_tflops=43.5", "--help", "cluster")
    assert "--cluster.calibration" not in found  # which `phalanx bench` writes
    assert "--cluster.allow-unreliable, --cluster.no-allow-unreliable" in found
    assert "[≥ 0; 43.5 (command line: cluster.peak_tflops=43.5); default 0.0]" in " ".join(found.split())
    assert "--layout" not in found
    assert page(capsys, "--help", "lr").startswith("  --optimizer.lr X\n")
    assert "--run.sample-prompt TEXT" in page(capsys, "-h", "all", "train.steps=x")  # though the job is wrong


def test_help_on_an_unknown_name_is_a_mistake():
    with pytest.raises(JobError, match="--help lyout: no section or field of this name; did you mean layout"):
        VERB.parse(["--help", "lyout"])


@pytest.mark.parametrize("columns", [80, 140])
def test_help_has_the_width_of_the_terminal(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    longest = max(map(len, page(capsys, "--help", "all").splitlines()))
    assert longest <= min(columns, 120)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--tp", "2", "--tp", "3"], "command line: --tp 2 and --tp 3 both set layout.tp; give one of them, or "),
        (["tp=2,pp=2", "layout.tp=4"], "tp=2,pp=2 and layout.tp=4 both set layout.tp"),
        (["lr=1e-3", "lr=2e-3"], "++optimizer.lr=VALUE, which replaces what stands before it"),
        (["--steps", "2", "--steps=3"], "--steps 2 and --steps 3: give one of them"),
    ],
)
def test_two_values_for_one_thing_are_refused_with_both(argv: list[str], said: str) -> None:
    [problem] = problems("layout.dp_replicate=1", *argv)
    assert said in problem


def test_the_same_value_twice_is_one_and_plus_plus_replaces() -> None:
    assert parse("lr=1e-3", "--lr", "0.001", "--steps", "3", "--steps=3").job.optimizer.lr == 0.001
    words = parse("layout.tp=2", "layout.sp=true", "++layout=pp=2", "train.global_batch=8", "++train.global_batch=16")
    assert (words.job.layout.line(), words.job.train.global_batch) == ("pp=2", 16)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("rope_scaling=yarn", "that is a section: model.rope_scaling.kind, model.rope_scaling.factor"),
        ("use_cache=false", "there is nothing to set"),
        ("early_stopping_patience=3", "a run is as long as train.steps"),
    ],
)
def test_words_of_other_programs_have_an_answer(word: str, said: str) -> None:
    assert said in problems(word)[0]
