"""The command line as a whole: help pages, options, completion, and the verbs without a job."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.check.load import load_file
from phalanx.cli import launch
from phalanx.cli.installation import SHELLS, script, words
from phalanx.cli.main import VERBS, description_of, main, run
from phalanx.cli.verb import Option, Words, clipped, command_lines, job_verb
from phalanx.errors import JobError

# The command line as a whole: help without torch, unknown verbs, exit codes.


IN_A_FRESH_PROCESS = """
import contextlib, io, json, sys
from phalanx.cli.main import main
found = []
for argv in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(argv)
        except SystemExit as left:
            code = left.code or 0
    heavy = sorted({"torch", "transformers", "tokenizers"} & set(sys.modules))
    found.append([argv, code, out.getvalue() != "", err.getvalue(), heavy])
print(json.dumps(found))
"""
LIGHT = [
    [],
    ["--help"],
    ["--version"],
    *([verb, "--help"] for verb in VERBS),
    ["train", "--print-config", "model=llama3-8b"],
    ["train", "--print-config", "--json"],
]


def test_help_and_configuration_answer_without_torch():
    command = [sys.executable, "-c", IN_A_FRESH_PROCESS, json.dumps(LIGHT)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[argv, 0, True, "", []] for argv in LIGHT]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "phalanx: no verb 'trian'; did you mean `phalanx train`?"),
        (["from", "x.toml"], "phalanx: no verb 'from'; did you mean `phalanx plan --from FILE`?"),
        (["xyz"], "phalanx: no verb 'xyz'; the verbs are: init, train, launch, verify, generate, serve"),
        (["job.yaml"], "phalanx: no verb 'job.yaml'; put the verb first: `phalanx train job.yaml`"),
        *(
            (
                [verb, *words, "offload=parameters"],
                "layout.offload: parameters on the host are updated there, so their optimizer has to be there;",
            )
            for verb in ("train", "verify", "plan", "predict", "simulate")
            for words in (["model=tiny"], ["model=tiny", "--print-config"], ["model=tiny", "layout=auto"])
        ),
        (
            ["train", "model=mixtral-8x7b", "--ep", "3", "--dp_shard", "3"],
            "layout.ep: n_experts 8 / ep 3 is not an integer",
        ),
        (["generate", "nowhere"], "phalanx: no run in nowhere: there is no such folder"),
    ],
)
def test_mistakes_are_one_message_and_a_code(argv, message, capsys):
    code = main(argv)
    error = capsys.readouterr().err
    assert code == 2
    assert message in error
    assert "Traceback" not in error


def test_training_without_a_job_is_explained(capsys):
    for argv in (["train"], ["train", "--json"]):
        assert main(argv) == 2
        assert "phalanx train needs a job: a file, or fields\n  phalanx init " in capsys.readouterr().err


def test_several_problems_are_listed(capsys):
    assert main(["train", "stepz=3", "--lr", "x"]) == 2
    assert capsys.readouterr().err.splitlines()[0] == "phalanx: 2 problems:"


def test_torch_is_not_imported_by_the_packages_that_plan():
    modules = "phalanx.check.load, phalanx.blocks.parameters, phalanx.data.loader"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


OPENMPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "1"}


@pytest.mark.parametrize("argv", [["schedule", "list"], ["train", "--help"], ["trian"], []], ids=" ".join)
def test_of_several_ranks_only_the_first_does_what_one_process_does(argv, monkeypatch, capsys):
    printed = {}
    for rank in range(3):
        for name, value in OPENMPI.items():
            monkeypatch.setenv(name, value)
        for name in ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):
            monkeypatch.setenv(name, str(rank))
        code = main(argv)
        printed[rank] = (code, *capsys.readouterr())
    assert printed[0][1] or printed[0][2]
    assert printed[1] == printed[2] == (0, "", "")
    if argv == ["schedule", "list"]:
        assert printed[0][0] == 0
        assert printed[0][2] == "phalanx schedule runs once: rank 0 of 4 does it, the others end\n"


def test_half_of_a_launcher_s_variables_is_said_by_one_rank(monkeypatch, capsys):
    monkeypatch.setenv("PMI_FD", "9")
    for rank, code in ((0, 2), (1, 2)):
        monkeypatch.setenv("PMI_RANK", str(rank))
        assert main(["schedule", "list"]) == code
        assert capsys.readouterr().err.count("incompletely: PMI_SIZE") == 1 - rank


@pytest.mark.parametrize(("when", "code"), [("during", 130), ("after", 0)])
def test_an_interrupt_at_the_end_is_no_bare_signal(when, code):
    done = f"import os, signal, sys, phalanx.cli.main as m; end = lambda: os.kill(os.getpid(), signal.SIGINT) or {code}"
    ends = {"during": "m.main = end; c = m.command()", "after": "m.main = lambda: 0; c = m.command(); end()"}[when]
    words = [sys.executable, "-c", f"{done}; {ends}; sys.exit(c)"]
    found = subprocess.run(words, check=False, capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (code, "phalanx: interrupted\n" if code else "")


def test_a_rank_that_there_is_none_of_says_it_itself(monkeypatch, capsys):
    """Rank 0 of 2 finds nothing wrong."""
    slurm = {"SLURM_PROCID": "3", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "job.yaml"]) == 2
    assert "slurm: SLURM_PROCID=3 SLURM_NTASKS=2" in capsys.readouterr().err


def test_a_stream_that_has_no_multiplication_sign():
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "phalanx",
            "predict",
            "model=tiny",
            "data.corpus=random",
            "cluster=dgx-h100:1",
            "dp_shard=8",
        ],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "accumulation 1 \\xd7 data ranks 8" in done.stdout


# The help pages of all verbs: short, in the width of the terminal, and made from what the verbs parse.

WIDTHS = (60, 80, 140)
MOST_LINES = 45


def page(capsys, monkeypatch, width: int, *argv: str) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main([*argv]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_a_page_is_short_and_fits_the_terminal(verb, capsys, monkeypatch):
    described = description_of(verb)
    for width in WIDTHS:
        found = page(capsys, monkeypatch, width, verb, "--help")
        lines = found.splitlines()
        assert max(map(len, lines)) <= width
        assert len(lines) <= MOST_LINES
        assert lines[0].startswith(f"usage: phalanx {verb}")
        text = " ".join(found.split())
        assert described.about in text
        assert text.count(" phalanx ", text.index("examples:"), text.index(" options: ")) >= 2
        assert not [option.name for option in described.options if f"--{option.name.replace('_', '-')}" not in found]


@pytest.mark.parametrize("verb", VERBS)
def test_a_page_in_full_fits_the_terminal(verb, capsys, monkeypatch):
    for width in (60, 80):
        found = page(capsys, monkeypatch, width, verb, *(["prepare"] if verb == "data" else []), "--help", "all")
        assert max(map(len, found.splitlines())) <= width
        text = " ".join(found.split())
        assert not [option.name for option in description_of(verb).options if option.text not in text]


def test_the_list_of_verbs_is_short_and_fits_the_terminal(capsys, monkeypatch):
    for width in WIDTHS:
        lines = page(capsys, monkeypatch, width).splitlines()
        assert max(map(len, lines)) <= width
        assert {line.split()[0] for line in lines if line.startswith("  ")} >= {*VERBS}
    assert page(capsys, monkeypatch, 80, "help", "plan") == page(capsys, monkeypatch, 80, "plan", "--help")


@pytest.mark.parametrize("verb", VERBS)
def test_the_two_examples_parse(verb):
    described = description_of(verb)
    assert len(described.examples) == 2
    assert any(line.split()[0] == verb for line, _ in described.examples)
    for line, what in described.examples:
        assert what
        name, *rest = shlex.split(line.partition(" > ")[0])
        called = description_of(name)
        if name == "launch":
            rest, _ = launch.own_names(rest)
        if called.takes_job:
            assert called.command_line(rest[len(called.name.split()) - 1 :])[1].problems == []
        else:
            assert called.read(rest)[1] == []


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_says_what_it_does(verb):
    for option in description_of(verb).options:
        assert len(option.about.split()) >= 2, option.name


def test_help_explains_one_command_or_one_option(capsys, monkeypatch):
    found = page(capsys, monkeypatch, 80, "checkpoint", "convert", "--help")
    assert found.startswith("usage: phalanx checkpoint convert SOURCE TARGET [options]\n")
    assert "--merge-lora" in found
    assert "--boxes" not in found
    assert found == page(capsys, monkeypatch, 80, "checkpoint", "--help", "convert")
    assert page(capsys, monkeypatch, 80, "generate", "--help", "top-k").split()[:2] == ["--top-k", "N"]
    assert page(capsys, monkeypatch, 80, "watch", "--help", ".").startswith("usage: phalanx watch RUN")
    assert main(["watch", "--help", "onse"]) == 2
    assert "--help onse: no option of this name; did you mean once" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["watch", "a", "b"], "phalanx watch takes RUN, found a b"),
        (["generate", "--temperature", "0"], "phalanx generate takes RUN, found nothing"),
        (["evaluate", "--batch-size", "x"], "--batch-size: expected a whole number, found 'x'"),
        (["checkpoint", "lst"], "phalanx checkpoint has no command 'lst'; did you mean `phalanx checkpoint list`?"),
        (["init", "a.yaml", "b.yaml"], "phalanx init takes [FILE], found a.yaml b.yaml"),
        (["serve", "runs/main", "--host"], "--host: needs a value"),
    ],
    ids=" ".join,
)
def test_mistakes_are_one_message(argv, message, capsys):
    assert main(argv) == 2
    assert message in capsys.readouterr().err


H100 = ("model=llama3-8b", "cluster=dgx-h100", "dp_shard=8", "train.global_batch=8")
IN_VAIN = {
    "--from has no effect without --svg": ("simulate", *H100, "--from", "0.1"),
    "--slow-link tp=2: the layout has one rank along tp": ("simulate", *H100, "--slow-link", "tp=2"),
    "--straggler 0 is given twice": ("simulate", *H100, "--straggler", "0=2", "0=3"),
    "--slow-link 0-1 is given twice": ("simulate", *H100, "--slow-link", "0-1=2", "1-0=3"),
    "--out has no effect without --table": ("predict", *H100, "--out", "x.csv"),
    "--ignore has no effect without --from": ("predict", *H100, "--ignore", "x"),
    "--largest excludes --tokens": ("predict", *H100, "--largest", "80", "--tokens", "1T"),
    "--seed has no effect without --runs": ("goodput", "--seed", "5"),
    "--days: no effect with --print-causes": ("goodput", "--print-causes", "--days", "3"),
    "--out: no effect with --json": ("report", "run", "--json", "--out", "x.html"),
    "--limit has no effect without --tasks": ("evaluate", "run", "--limit", "5"),
    "--text-field has no effect without --files": ("evaluate", "run", "--text-field", "body"),
    "--precision: tasks of lm-eval": ("evaluate", "run", "--tasks", "piqa", "--precision", "bf16"),
    "--draft-tokens has no effect without --assistant": ("generate", "run", "--draft-tokens", "3"),
    "--samples, --seed: no effect with --temperature 0": (
        *("generate", "run", "--temperature", "0", "--samples", "2", "--seed", "4"),
    ),
    "--max-file-gib is for a folder of safetensors": (
        *("checkpoint", "convert", "run", "x", "--to", "dcp", "--max-file-gib", "1"),
    ),
}


@pytest.mark.parametrize("message", IN_VAIN)
def test_an_option_without_an_effect_is_refused(message, capsys):
    assert main([*IN_VAIN[message]]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_the_options_beside_which_others_stand_exist(verb):
    options = {option.name: option for option in description_of(verb).options}
    assert {beside for option in options.values() for beside in option.beside} <= {*options}


def test_the_table_of_causes_is_json_where_it_is_asked_for(capsys):
    assert main(["goodput", "--print-causes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["cause"] == "Faulty GPU"


def test_an_option_that_may_be_repeated_has_all_its_values():
    words, problems = description_of("generate").read(["run", "--stop", "a", "--stop=b"])
    assert (words.options["stop"], words.stated, problems) == (("a", "b"), {"stop"}, [])


def test_a_long_command_is_broken_as_a_shell_reads_it():
    lines = command_lines("phalanx plan model=llama3-8b cluster=dgx-h100:1", 30, 2)
    assert lines == ["  phalanx plan \\", "      model=llama3-8b \\", "      cluster=dgx-h100:1"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("All of it.", "All of it."),
        ("The first sentence. And a second one.", "The first sentence"),
        ("One: a clause that says little is no text", "One: a clause that says …"),
    ],
)
def test_a_text_is_clipped_at_a_sentence_or_a_word(text, shown):
    assert clipped(text, 26) == shown


# A verb's own options with values, beside switches, job files and overrides.

VERB = job_verb(
    "test",
    "A verb.",
    (("test job.yaml", "a test"), ("test --quick", "a quick one")),
    {"quick": "Be quick."},
    {
        "steps": Option("Steps.", 2, at_least=1),
        "names": Option("Names.", (), str, many=True),
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


def page_of(capsys, *argv: str) -> str:
    assert VERB.parse(argv) is None
    return capsys.readouterr().out


def test_the_page_of_help_is_short_and_shows_the_verb_s_own_options(capsys):
    found = page_of(capsys, "--help", "--steps", "5")
    assert "--steps N" in found
    assert "--names TEXT ..." in found
    assert "--quick" in found
    assert "--layout.tp" not in found
    assert len(found.splitlines()) < 40


def test_help_explains_a_section_or_a_field_with_the_job_s_values(capsys):
    found = page_of(capsys, "cluster.peak_tflops=43.5", "--help", "cluster")
    assert "--cluster.calibration" not in found  # which `phalanx bench` writes
    assert "--cluster.allow-unreliable, --cluster.no-allow-unreliable" in found
    assert "[≥ 0; 43.5 (command line: cluster.peak_tflops=43.5); default 0.0]" in " ".join(found.split())
    assert "--layout" not in found
    assert page_of(capsys, "--help", "lr").startswith("  --optimizer.lr X\n")
    assert "--run.sample-prompt TEXT" in page_of(capsys, "-h", "all", "train.steps=x")  # though the job is wrong


def test_help_on_an_unknown_name_is_a_mistake():
    with pytest.raises(JobError, match="--help lyout: no section or field of this name; did you mean layout"):
        VERB.parse(["--help", "lyout"])


@pytest.mark.parametrize("columns", [80, 140])
def test_help_has_the_width_of_the_terminal(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    longest = max(map(len, page_of(capsys, "--help", "all").splitlines()))
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


# The completion scripts in the shells that are installed: bash, and zsh and fish where they are.

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
    for shell in SHELLS:
        (folder / shell).write_text(script(shell))
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
    assert [*words()["arguments"]] == [*VERBS]
    assert {"--json", "--print-config", "--help"} <= {*words()["arguments"]["train"]}
    assert not [verb for verb, found in words()["arguments"].items() if "--help" not in found]


def test_another_shell_is_refused(capsys):
    assert main(["completion", "zhs"]) == 2
    assert "no command 'zhs'; did you mean `phalanx completion zsh`?" in capsys.readouterr().err


# The verbs `examples` and `docs`: what a user without a clone starts from.


def test_every_example_is_listed_written_and_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["examples", "--json"]) == 0
    names = json.loads(capsys.readouterr().out)
    assert {"main", "pipeline", "preferences"} <= set(names)
    assert run(["examples", "all"]) == 0
    written = capsys.readouterr().out
    for name in names:
        assert f"written: examples/{name}.yaml" in written
        if name not in ("grpo", "preferences", "smollm2"):  # starts from another run
            assert load_file(Path(f"examples/{name}.yaml")).job.run.name == name
    assert "written: examples/preferences.jsonl" in written


def test_an_example_brings_its_rows_and_overwrites_nothing(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["examples", "preferences", "--out", "jobs"]) == 0
    assert sorted(path.name for path in Path("jobs").iterdir()) == ["preferences.jsonl", "preferences.yaml"]
    assert run(["examples", "preferences", "--out", "jobs"]) == 0  # the same again changes nothing
    Path("jobs/preferences.yaml").write_text("mine")
    with pytest.raises(JobError, match="is there and differs"):
        run(["examples", "preferences", "--out", "jobs"])
    assert Path("jobs/preferences.yaml").read_text() == "mine"
    capsys.readouterr()


@pytest.mark.parametrize("word", ["job", "docs/reference/job.md", "job.md"])
def test_a_page_is_found_by_the_name_that_messages_have(word: str, capsys) -> None:
    assert run(["docs", word]) == 0
    assert capsys.readouterr().out.startswith("# The job file")


def test_a_mistyped_name_gets_a_near_one() -> None:
    with pytest.raises(JobError, match="did you mean main?"):
        run(["examples", "mian"])
    with pytest.raises(JobError, match="did you mean"):
        run(["docs", "tutorial/first-run"])


def test_a_command_by_default_takes_options(capsys):
    assert main(["extensions", "--json"]) == 0
    json.loads(capsys.readouterr().out)
