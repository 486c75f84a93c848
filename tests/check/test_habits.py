"""Command lines of ezpz and wordplay, as their users type them: what is taken, what is answered, what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import fields

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from phalanx.check.effect import effect_problems
from phalanx.check.job import problems_of
from phalanx.check.load import LoadedJob, load_words
from phalanx.cli import main
from phalanx.config import overrides, values
from phalanx.config.fields import get, leaves, replace
from phalanx.config.foreign_names import ALIASES
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.presets import PRESETS
from phalanx.errors import JobError

FOUR_DATA_RANKS = ["dp_shard=2", "dp_replicate=2"]


def load(*argv: str) -> LoadedJob:
    return load_words(overrides.parse(argv, {"fresh", "json"}))


def problems(*argv: str) -> list[str]:
    with pytest.raises(JobError) as caught:
        load(*argv)
    return caught.value.problems


@pytest.mark.parametrize(
    ("argv", "expected", "answers"),
    [
        (["train.dtype=bf16"], {"train.precision": "bf16"}, ["train.dtype=bf16: taken as train.precision=bf16"]),
        (["--dtype", "bfloat16"], {"train.precision": "bf16"}, ["--dtype bfloat16: taken as train.precision=bf16"]),
        (["--fp32"], {"train.precision": "fp32"}, ["--fp32: taken as train.precision=fp32"]),
        (["--train-iters=7"], {"train.steps": 7}, ["--train-iters=7: taken as train.steps=7"]),
        (["train.max_iters=7"], {"train.steps": 7}, ["train.max_iters=7: taken as train.steps=7"]),
        (["+train.max_iters=7"], {"train.steps": 7}, ["+train.max_iters=7: taken as train.steps=7"]),
        (["--dim", "256"], {"model.d_model": 256}, ["--dim 256: taken as model.d_model=256"]),
        (["--hidden-dim=512"], {"model.d_ff": 512}, ["--hidden-dim=512: taken as model.d_ff=512"]),
        (["--max_grad_norm=0.5"], {"optimizer.clip": 0.5}, ["--max_grad_norm=0.5: taken as optimizer.clip=0.5"]),
        (["--ac", "block"], {"layout.recompute": "full"}, ["--ac block: taken as layout.recompute=full"]),
        (
            ["--ac=selective"],
            {"layout.recompute": "selective"},
            ["--ac=selective: taken as layout.recompute=selective"],
        ),
        (
            ["--reshard-after-forward", "never", "--dp-shard", "2"],
            {"layout.reshard": False, "layout.dp_shard": 2},
            ["--reshard-after-forward never: taken as layout.reshard=false"],
        ),
        (
            ["--reshard-after-forward", "--tp", "2"],
            {"layout.reshard": True, "layout.tp": 2},
            ["--reshard-after-forward: taken as layout.reshard=true"],
        ),
        (
            ["--no-reshard-after-forward", "dp_shard=2"],
            {"layout.reshard": False},
            ["--no-reshard-after-forward: taken as layout.reshard=false"],
        ),
        (["--async-ckpt"], {"checkpoint.background": True}, ["--async-ckpt: taken as checkpoint.background=true"]),
        (["--dataset", "random"], {"data.corpus": "random"}, ["--dataset random: taken as data.corpus=random"]),
        (
            ["data=shakespeare"],
            {"data.corpus": "shakespeare_char"},
            ["data=shakespeare: taken as data.corpus=shakespeare_char"],
        ),
        (["train.device=cpu"], {"cluster.device": "cpu"}, ["train.device=cpu: taken as cluster.device=cpu"]),
        (["optimizer.decay_lr=false"], {"optimizer.schedule": "constant"}, None),
        (["model.n_layer=2", "model.n_head=2", "model.n_embd=64", "model.block_size=32"], {"model.seq_len": 32}, None),
        (["--outdir", "x"], {"run.dir": "x"}, ["--outdir x: taken as run.dir=x"]),
        (
            ["train.use_wandb=false"],
            {},
            ["train.use_wandb=false: taken as run.trackers=[]"],
        ),
        (["--n-layers=8", "--compile", "--lr", "1e-4"], {"model.n_layers": 8}, None),
        # the batch equation
        (
            [*FOUR_DATA_RANKS, "model.batch_size=64"],
            {"layout.micro_batch": 64, "train.global_batch": 0},
            [
                "model.batch_size=64: taken as layout.micro_batch=64, train.global_batch=0",
                "global batch 256 = micro-batch 64 × accumulation 1 × data ranks 4",
            ],
        ),
        (
            [*FOUR_DATA_RANKS, "--batch-size", "4", "global_batch=32"],
            {"layout.micro_batch": 4, "train.global_batch": 32},
            [
                "--batch-size 4: taken as layout.micro_batch=4",
                "global batch 32 = micro-batch 4 × accumulation 2 × data ranks 4",
            ],
        ),
        (
            [*FOUR_DATA_RANKS, "optimizer.gas=2", "--batch-size=8"],
            {"layout.accumulation": 2},
            None,
        ),
        (
            [*FOUR_DATA_RANKS, "optimizer.gradient_accumulation_steps=8"],
            {"layout.accumulation": 2},
            None,
        ),
        (["gradient_accumulation_steps=8"], {"layout.accumulation": 8}, None),
        ([*FOUR_DATA_RANKS, "--gradient-accumulation-steps", "1"], {"layout.accumulation": 1}, None),
        (
            ["dp_shard=4", "train.backend=deepspeed"],
            {"layout.dp_shard": 4, "layout.zero": 1},
            ["train.backend=deepspeed: taken as layout.dp_shard=4, layout.dp_replicate=1, layout.zero=1"],
        ),
        (["dp_shard=4", "zero=2", "--backend=deepspeed"], {"layout.zero": 2}, None),
        (["layout=auto", "train.backend=DDP"], {"layout.dp_shard": 1, "layout.dp_replicate": 1}, None),
        # fields that others determine
        (["optimizer.min_lr=1e-4", "optimizer.learning_rate=1e-3"], {"optimizer.min_lr_ratio": 0.1}, None),
        (["optimizer.beta2=0.99"], {"optimizer.betas": (0.9, 0.99)}, None),
        (["--beta1=0.8", "--beta2=0.99"], {"optimizer.betas": (0.8, 0.99)}, None),
        (["--dim=4096", "--multiple-of=256", "--n-heads=32"], {"model.d_ff": 11008}, None),  # Llama 2 7B
        (  # Llama 2 70B
            ["--dim=8192", "--multiple-of=4096", "--ffn-dim-multiplier=1.3", "--n-heads=64"],
            {"model.d_ff": 28672},
            None,
        ),
        (["--loss-impl=chunked"], {"layout.loss_chunk": 1024}, None),
        (["--loss-impl=chunked", "--loss-chunk-size=512"], {"layout.loss_chunk": 512}, None),
        # values
        (["zero=fsdp"], {"layout.zero": 3}, ["zero=fsdp: taken as layout.zero=3"]),
        (["schedule=1F1B"], {"layout.schedule": "1f1b"}, ["schedule=1F1B: taken as layout.schedule=1f1b"]),
        (
            ["schedule=Cosine"],
            {"optimizer.schedule": "cosine"},
            ["schedule=Cosine: taken as optimizer.schedule=cosine"],
        ),
        (["schedule=pipedream", "pp=2"], {"layout.schedule": "pipedream"}, []),
        (["pp=2", "schedule=GPipe"], {"layout.schedule": "gpipe"}, None),
        (["pp=2,schedule=Interleaved1F1B,recompute=Full"], {"layout.recompute": "full"}, None),
        (["model=gpt2_medium"], {"model.preset": "gpt2-medium", "model.d_model": 1024}, None),
        (["model=shakespeare"], {"model.preset": "baby"}, ["model=shakespeare: taken as model.preset=baby"]),
    ],
)
def test_what_is_taken_and_answered(argv: list[str], expected: dict[str, object], answers: list[str] | None) -> None:
    loaded = load(*argv)
    assert {path: get(loaded.job, path) for path in expected} == expected
    assert answers is None or loaded.answers == answers


def test_the_launch_line_of_wordplay_s_readme() -> None:
    loaded = load(
        *("+experiment=shakespeare", "data=shakespeare", "train.backend=DDP", "train.max_iters=1000"),
        *("train.log_interval=5", "train.compile=true"),
    )
    job = loaded.job
    assert job.model == replace(Job(), "model", PRESETS["baby"]).model
    assert (job.train.steps, job.train.log_every, job.train.precision, job.train.compile) == (1000, 5, "bf16", True)
    assert (job.layout.micro_batch, job.optimizer.betas, job.data.corpus) == (64, (0.9, 0.99), "shakespeare_char")
    assert loaded.origins["model.preset"] == "command line: +experiment=shakespeare"
    assert len(loaded.answers) == 5


def test_origins_show_the_alias() -> None:
    origins = load("train.dtype=bf16", "--batch-size", "4").origins
    assert origins["train.precision"] == "command line: train.dtype=bf16"
    assert origins["layout.micro_batch"] == "command line: --batch-size 4"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["train.dtype=bf16", "train.precision=fp32"],
            "command line: train.dtype=bf16 and train.precision=fp32 both set",
        ),
        (["--max-iters=1", "--train-iters=2"], "--max-iters=1 and --train-iters=2 both set train.steps"),
        (["dp_replicate=2", "train.backend=FSDP"], "train.backend=FSDP and dp_replicate=2 contradict each other"),
        (["dp_shard=4", "train.backend=DDP"], "train.backend=DDP and dp_shard=4 contradict each other"),
        (
            ["--batch-size=4", "micro_batch=8"],
            "--batch-size=4 and micro_batch=8 contradict each other; give one of them",
        ),
        (["--backend=horovod"], "expected DDP, FSDP or deepspeed, found 'horovod'"),
        (["--backend=nccl"], "the communication library follows from cluster.device"),
        ([*FOUR_DATA_RANKS, "gradient_accumulation_steps=8"], "of all ranks (nanoGPT, wordplay) or of each (DeepSpeed"),
        ([*FOUR_DATA_RANKS, "optimizer.gradient_accumulation_steps=6"], "6 micro-batches of all ranks / data ranks 4"),
        (["--min-lr=1"], "must lie between 0 and optimizer.lr 0.001, is 1"),
        (["--dataset", "mnist"], "mnist are images, and the models here are language models"),
        (["--dataset=eliplutchok/fineweb-small-sample"], "nothing is downloaded; nearest: data.corpus=text"),
        (["--model", "xl"], "xl is one of ezpz's sizes"),
        (["--epochs", "5"], "a run is as long as train.steps"),
        (["--ckpt-dir=x"], "set run.dir and run.name"),
        (["--wandb-project=x"], "that is the variable WANDB_PROJECT"),
        (["--num-workers=4"], "a thread of each rank reads batches ahead"),
        (["--lora-rank", "8"], "that is model.lora.rank"),
        (["--loss-impl=fused-linear"], "nearest legal: chunked"),
        (["--dtype"], "--dtype needs a value"),
        (["--dtype=bf17"], "train.precision: expected one of fp64, fp32, bf16, fp16, fp8, auto, found 'bf17'"),
        (["--ffn-dim-multiplier=x"], "expected a number, found 'x'"),
        (["--multiple-of=0"], "must be positive"),
        (["schedule=ZeroBubble"], "no schedule 'ZeroBubble'; did you mean zb_h1?"),
        (["layout.dtype=bf16"], "unknown key layout.dtype"),
    ],
)
def test_what_is_refused_and_why(argv: list[str], message: str) -> None:
    assert any(message in problem for problem in problems(*argv))


@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        ("DDP", {"dp_replicate": 4, "dp_shard": 1}),
        ("fsdp", {"dp_replicate": 1, "dp_shard": 4, "zero": 3}),
        ("DeepSpeed", {"dp_replicate": 1, "dp_shard": 4, "zero": 1}),
    ],
)
def test_a_backend_takes_all_data_ranks_of_the_job(backend: str, layout: dict[str, int], tmp_path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("cluster: {devices_per_node: 8}\nlayout: {dp_replicate: 2, dp_shard: -1, tp: 2, zero: 1}\n")
    loaded = load(str(path), f"train.backend={backend}")
    assert {name: getattr(loaded.job.layout, name) for name in layout} == layout
    assert loaded.job.layout.tp == 2
    assert loaded.origins["layout.dp_shard"] == f"command line: train.backend={backend}"
    again = load(str(path), f"train.backend={backend}", *(f"{name}={value}" for name, value in layout.items()))
    assert again.job == loaded.job


def test_the_same_value_by_two_names_is_no_contradiction() -> None:
    assert load("--lr=1e-3", "learning_rate=0.001").job.optimizer.lr == 0.001
    assert load("--max-iters=5", "--max-iters=6").job.train.steps == 6
    assert load("--ac=full", "layout=tp=2").job.layout == Layout(tp=2)


VALUES = ["", "0", "-1", "1", "4", "1e300", "9" * 90, "0.5", "nan", "x", "true", "DDP", "random", "chunked", "a,b", "é"]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(ALIASES)), st.sampled_from(VALUES)), max_size=5), st.sampled_from(VALUES)
)
def test_no_values_of_aliases_make_it_crash(words: list[tuple[str, str]], size: str) -> None:
    try:
        load(f"dp_shard={size}", f"d_model={size}", f"lr={size}", *(f"{name}={value}" for name, value in words))
    except JobError as error:
        assert error.problems


def test_a_password_is_not_repeated() -> None:
    loaded = load("--outdir", "s3://me:secret@host/runs")
    assert loaded.answers == ["--outdir s3://…@host/runs: taken as run.dir=s3://…@host/runs"]
    assert "secret" not in loaded.origins["run.dir"]


def test_no_resume_is_fresh() -> None:
    words = overrides.parse(["--no-resume"], {"fresh"})
    assert (words.switches, words.answers) == ({"fresh"}, ["--no-resume: taken as --fresh"])
    assert overrides.parse(["--no-resume"]).problems


def test_files_name_fields_but_values_may_be_spelled_otherwise(tmp_path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("train: {precision: BFloat16}\nlayout: {schedule: GPipe, pp: 2}\n")
    loaded = load(str(path))
    assert (loaded.job.train.precision, loaded.job.layout.schedule) == ("bf16", "gpipe")
    assert loaded.answers[0] == f"{path}:1: taken as train.precision=bf16"
    path.write_text("train: {dtype: bf16}\n")
    assert problems(str(path)) == [f"{path}:1: unknown key train.dtype; did you mean train.precision?"]


def test_answers_go_to_standard_error_and_only_of_rank_0(monkeypatch, capsys) -> None:
    argv = ["predict", "model=gpt2", "cluster=dgx-h100", "train.dtype=bf16", "dp_shard=8", "--json"]
    assert main.main(argv) == 0
    printed = capsys.readouterr()
    assert printed.err.count("train.dtype=bf16: taken as train.precision=bf16\n") == 1
    document = json.loads(printed.out)
    assert main.main(["train.precision=bf16" if word == "train.dtype=bf16" else word for word in argv]) == 0
    assert json.loads(capsys.readouterr().out) == document
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    main.main(argv)
    assert "taken as" not in capsys.readouterr().err


def layouts() -> st.SearchStrategy[Layout]:
    """Layouts whose sizes are legal for a model that everything divides, if their fields go together."""
    axis = st.sampled_from([1, 1, 2, 4])
    choices = {
        **dict.fromkeys(("dp_replicate", "dp_shard", "tp", "pp", "cp", "cp_ulysses", "tiles", "sync_every"), axis),
        "zero": st.sampled_from([1, 2, 3]),
        "cp_inner": st.sampled_from(["ulysses", "ring"]),
        "accumulate": st.sampled_from(["local", "sharded"]),
        "recompute": st.sampled_from(["none", "selective", "full"]),
        "schedule": st.sampled_from(["1f1b", "gpipe", "interleaved_1f1b", "zb_v", "pipedream", "terapipe"]),
        "sync": st.sampled_from(["bsp", "bsp", "diloco", "local_sgd"]),
        **dict.fromkeys(("micro_batch", "accumulation", "pp_chunks", "prefetch"), st.sampled_from([0, 1, 2, 4])),
        "loss_chunk": st.sampled_from([0, 128]),
        **dict.fromkeys(("sp", "sp_regather", "reshard"), st.booleans()),
    }
    return st.builds(Layout, **choices)


MODEL = ["model.n_layers=16", "n_heads=8", "d_model=128", "eval_samples=0", "global_batch=0"]


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_a_shown_layout_is_read_back_in_every_form(layout: Layout) -> None:
    job = replace(load(*MODEL).job, "layout", layout)
    every = {f"layout.{field.name}" for field in fields(Layout)}
    legal = not problems_of(job) and not [*effect_problems(job, every)]
    event(f"legal: {legal}")
    line = layout.line()
    spaced = line.replace(",", " ")
    broken = re.sub(",", ", ", line, count=1)  # a table's cell of two lines
    for pasted in ([line], spaced.split(), [spaced], [f"layout={line}"], ["layout:", line], broken.split(" ")):
        words = overrides.parse(pasted)
        read = Job()
        for setting in words.settings:
            read = replace(read, setting.path, values.convert(setting.text, leaves()[setting.path]))
        assert (words.problems, read.layout) == ([], layout)
        if legal:
            assert load(*MODEL, *pasted).job == job


LINE = re.compile(r"(?:(?:%s)=[\w*+.]+[, ]?\s*)+" % "|".join(field.name for field in fields(Layout)))  # noqa: UP031
CLUSTER = ["model=llama3-8b", "cluster=dgx-h100:2", "train.precision=bf16", "train.global_batch=64"]


@pytest.mark.parametrize(
    "verb",
    [
        ["plan", "--top", "3"],
        [
            "predict",
            "dp_shard=4",
            "tp=2",
            "pp=2",
            "sp=true",
            "schedule=interleaved_1f1b",
            "pp_chunks=4",
            "recompute=full",
        ],
        ["simulate", "dp_shard=4", "tp=2", "pp=2", "sp=true", "schedule=zb_v", "recompute=full", "micro_batch=1"],
    ],
)
def test_what_verbs_print_is_taken_by_predict(verb: list[str], capsys) -> None:
    main.main([*verb, *CLUSTER])
    text = capsys.readouterr().out
    text = text[text.find("best layout:") :] if "best layout:" in text else text  # the table above has wrapped cells
    text, mark, table = text.partition("alternatives:")
    text += mark + " ".join(row[69:] for row in table.partition("rejected:")[0].splitlines())  # its last column
    shown = [found[0].strip().rstrip(",") for found in LINE.finditer(re.sub(r"\s+", " ", text))]
    assert len(shown) >= 1
    for line in shown:
        words = line.split(" ")
        whole = load(*CLUSTER, f"layout={line.replace(' ', ',').replace(',,', ',')}").job.layout
        assert load(*CLUSTER, *words).job.layout == whole, line
        assert main.main(["predict", *CLUSTER, *words, "--json"]) in (0, 3)
        capsys.readouterr()


@pytest.mark.parametrize(
    "words", [["dp_shard=4", "pp=2:"], ["dp_shard=4,pp=2:"], ["pp=2,", "dp_shard=4"]], ids=" ".join
)
def test_a_layout_copied_with_the_sign_behind_it_is_taken(words: list[str]) -> None:
    layout = load(*words, "model.n_layers=4").job.layout
    assert (layout.dp_shard, layout.pp) == (4, 2)
