"""From files and words to a job: precedence, origins, all problems at once, and the round trip through YAML."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.check.job import problems_of
from phalanx.check.load import as_dict, as_yaml, from_dict, load_words, resolve
from phalanx.config import overrides, yaml_file
from phalanx.config.fields import get, leaves, replace, short_names
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.presets import PRESETS
from phalanx.errors import JobError
from phalanx.techniques import catalogue as techniques


def load(tmp_path, text="train: {}", argv=()):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return load_words(overrides.parse([str(path), *argv], {"fresh", "json"}))


def problems(tmp_path, text="train: {}", argv=()):
    with pytest.raises(JobError) as caught:
        load(tmp_path, text, argv)
    return caught.value.problems


def test_the_command_line_wins_over_the_file_over_the_preset(tmp_path):
    text = "model: {preset: gpt2, n_layers: 6}\ntrain: {steps: 5}\n"
    loaded = load(tmp_path, text, ["train.steps=9", "--n-layers", "3"])
    assert loaded.job.model.d_model == 768
    assert loaded.job.model.n_layers == 3
    assert loaded.job.train.steps == 9
    assert loaded.origins["model.d_model"] == "preset gpt2"
    assert loaded.origins["model.n_layers"] == "command line: --n-layers 3"
    assert loaded.origins["train.steps"] == "command line: train.steps=9"
    assert loaded.origins["train.seed"] == "default"


def test_a_later_preset_keeps_what_an_earlier_file_set(tmp_path):
    loaded = load(tmp_path, "model: {preset: gpt2, n_layers: 6}\n", ["model=llama3-8b"])
    assert (loaded.job.model.preset, loaded.job.model.n_layers, loaded.job.model.norm) == ("llama3-8b", 6, "rmsnorm")


def test_the_run_is_named_after_the_file(tmp_path):
    assert load(tmp_path).job.run.name == "job"
    assert load(tmp_path, "run: {name: other}").job.run.name == "other"


@pytest.mark.parametrize(
    ("argv", "path", "value"),
    [
        (["--tp", "2"], "layout.tp", 2),
        (["--dp-replicate=2"], "layout.dp_replicate", 2),
        (["--dp_shard", "2"], "layout.dp_shard", 2),
        (["--steps", "7"], "train.steps", 7),
        (["--train.steps=7"], "train.steps", 7),
        (["steps=7"], "train.steps", 7),
        (["--compile"], "train.compile", True),
        (["--train.no-compile"], "train.compile", False),
        (["--no-bias"], "model.bias", False),
        (["--betas", "0.9,0.99"], "optimizer.betas", (0.9, 0.99)),
        (["--sample-prompt", "-x"], "run.sample_prompt", "-x"),
        (["data=random"], "data.corpus", "random"),
        (["schedule=pipedream", "pp=2"], "layout.schedule", "pipedream"),
        (["--schedule", "zb_v", "pp=2"], "layout.schedule", "zb_v"),
        (["schedule=gpipe,pp=2"], "layout.schedule", "gpipe"),
        (["schedule=cosine"], "optimizer.schedule", "cosine"),
        (["--schedule=wsd"], "optimizer.schedule", "wsd"),
        (["prefetch=3", "dp_shard=2"], "layout.prefetch", 3),
        (["tp=2,schedule=zb_v,pp=2"], "layout.schedule", "zb_v"),
        (["auto,tp=2"], "layout.auto", True),
        (["optimizer.betas=0.9,0.95"], "optimizer.betas", (0.9, 0.95)),
        (["sample_prompt=a=1,b=2"], "run.sample_prompt", "a=1,b=2"),
        (["--d-ff", "512"], "model.d_ff", 512),
    ],
)
def test_every_spelling_of_an_override(argv, path, value):
    words = overrides.parse(argv)
    assert words.problems == []
    job = resolve([*words.settings]).job
    assert get(job, path) == value


@pytest.mark.parametrize("alias", ["tp", "pp", "dp_shard", "dp_replicate", "cp", "ep", "n_layers", "steps", "lr"])
def test_the_promised_short_names_exist(alias):
    assert short_names()[alias] in leaves()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--stepz", "3"], "unknown option --stepz; did you mean train.steps?"),
        (["--json2"], "unknown option --json2; did you mean --json?"),
        (
            ["micro_batch_size=3"],
            "unknown key micro_batch_size in 'micro_batch_size=3'; did you mean layout.micro_batch?",
        ),
        (["--max-steps", "3"], "unknown option --max-steps; did you mean train.steps?"),
        (["--steps"], "--steps needs a value"),
        (["--schedule=cosin"], "unknown option --schedule; which one: layout.schedule or optimizer.schedule?"),
        (
            ["schedule=pipedrea"],
            "command line: schedule=pipedrea: layout.schedule: no schedule 'pipedrea'; did you mean",
        ),
        (["--dir=x"], "unknown option --dir; which one: data.dir or run.dir?"),
        (["tp=2,ppp=3"], "command line: tp=2,ppp=3: layout 'tp=2,ppp=3': unknown key ppp; did you mean pp?"),
        (["tp=2,lr=3"], "command line: tp=2,lr=3: layout 'tp=2,lr=3': optimizer.lr is not a field of the layout"),
        (
            ["train.strategy=ddp"],
            "unknown key train.strategy in 'train.strategy=ddp'; set the layout instead: dp_replicate",
        ),
        (
            ["zero_optimization.stage=2"],
            "unknown key zero_optimization.stage in 'zero_optimization.stage=2'; did you mean layout.zero?",
        ),
        (["--tensor-model-parallel-size", "2"], "unknown option --tensor-model-parallel-size; did you mean layout.tp?"),
        (["optimizer.kind=x"], "unknown key optimizer.kind in 'optimizer.kind=x'"),
        (["nothing.txt"], "unexpected 'nothing.txt': expected a job file (.yaml), key=value or --key value"),
        (["train.global_batch=3", "dp_shard=2"], "command line: train.global_batch=3: global_batch 3 ≠ micro_batch ?"),
        (["--warmup-steps", "900"], "command line: --warmup-steps 900: warmup_steps 900 is more than train.steps 200"),
        (["steps=x"], "command line: steps=x: train.steps: expected a whole number, found 'x'"),
        (
            ["model=gtp2"],
            "command line: model=gtp2: no model preset 'gtp2'; did you mean gpt2? `phalanx models` lists all",
        ),
        (
            ["layout=automatic"],
            "command line: layout=automatic: layout: expected auto, or a line such as dp_shard=4,tp=2",
        ),
        (["layout=3"], "command line: layout=3: layout: expected auto, or a line such as"),
        (["--layout"], "--layout needs a value"),
        (
            ["layout=auto,tpp=2"],
            "command line: layout=auto,tpp=2: layout 'auto,tpp=2': unknown key tpp; did you mean tp?",
        ),
        (["none.yaml"], "none.yaml: there is no such file"),
    ],
)
def test_what_is_wrong_with_a_command_line(argv, message):
    with pytest.raises(JobError) as caught:
        load_words(overrides.parse(argv, {"json"}))
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(message)


def test_all_mistakes_of_file_values_and_command_line_come_together(tmp_path):
    text = "train:\n  stepz: 3\n  steps: 1.5\n  global_batch: 10\nlayout:\n  dp_replicate: 4\n"
    found = problems(tmp_path, text, ["--tpp", "3", "schedule=cosin"])
    assert len(found) == 5
    assert any("job.yaml:2: unknown key train.stepz" in p for p in found)
    assert any("job.yaml:3: train.steps: expected a whole number" in p for p in found)
    assert any("job.yaml:4: train.global_batch" in p and "nearest legal global_batch: 8 or 12" in p for p in found)
    assert any("unknown option --tpp" in p for p in found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "layout: {tp: 3}",
            "layout.tp: n_heads 4 / tp 3 and MLP width 512 / tp 3 are not integers; nearest tp: 1, 2, 4",
        ),
        ("cluster: {device: gpu}", "cluster.device: expected one of auto, cpu, cuda, rocm, xpu, found 'gpu'"),
        ("layout: {pp: 5}", "layout.pp: pp 5 stages need at least as many layers, the model has 4"),
        ("layout: {cp: 3}", "layout.cp: seq_len 256 / cp 3 is not an integer; nearest cp: 1, 2, 4"),
        ("layout: {ep: 2}", "nearest legal: ep=1"),
        (
            "layout: {tp: 4}\nmodel: {n_heads: 12, n_kv_heads: 6, d_model: 96}",
            "layout.tp: tp 4 neither divides the n_kv_heads 6 nor is a multiple of them; nearest tp: 2, 3, 6",
        ),
        (
            "layout: {tp: 4, sp: true}\nmodel: {seq_len: 30}",
            "layout.tp: sequence parallel: seq_len 30 / tp 4 is not an integer",
        ),
        ("layout: {tp: 4, sp: true}\nmodel: {seq_len: 30}", "nearest tp: 1, 2, or sp=false"),
        (
            "layout: {tp: 2, sp_regather: true}",
            "layout.sp_regather: is a part of sequence parallelism; nearest legal: sp=true",
        ),
        (
            "layout: {dp_shard: 2, zero: 1, accumulate: sharded}",
            "layout.accumulate: sharded accumulation needs zero 2 or 3, zero is 1; nearest legal: accumulate=local",
        ),
        (
            "layout: {tp: 4}\nmodel: {d_ff: 510}",
            "layout.tp: MLP width 510 / tp 4 is not an integer; nearest tp: 1, 2",
        ),
        ("model: {n_heads: 3}", "d_model 128 / n_heads 3 is not an integer; nearest n_heads: 1, 2, 4"),
        ("model: {n_kv_heads: 3}", "n_heads 4 / n_kv_heads 3 is not an integer; nearest n_kv_heads: 1, 2, 4"),
        ("model: {dropout: 1}", "model.dropout: must be below 1"),
        ("model: {n_layers: 0}", "model.n_layers: must be at least 1, is 0"),
        ("layout: {dp_replicate: 4}\ncluster: {devices_per_node: 2}", "= 2; dp_replicate=2 makes it 2"),
        ("layout: {dp_replicate: -1}", "set cluster.devices_per_node"),
        ("layout: {dp_replicate: -1, dp_shard: -1}", "only one of dp_replicate and dp_shard"),
        ("data: {corpus: shakespear}", "did you mean shakespeare_char?"),
        ("data: text", "corpus text needs the path"),
        ("data: {corpus: random, document_mask: true}", "nearest legal: document_mask=false, or corpus=stdlib"),
        ("optimizer: {warmup_steps: 900}", "warmup_steps 900 is more than train.steps 200; nearest legal: 200"),
        ("optimizer: {batch_scaling: sqrt}", "needs the global batch for which lr was chosen"),
        ("optimizer: {betas: [0.9, 1.0]}", "must lie in [0, 1)"),
        (
            "run: {timeout_s: 60, hang_s: 90}",
            "hang_s: is 90, but must be below run.timeout_s 60",
        ),
        ("run: {timeout_s: 60, hang_s: 60}", "nearest legal: hang_s=0, which is at most 30"),
    ],
)
def test_what_cannot_run_is_refused_with_the_nearest_legal_choice(tmp_path, text, message):
    assert any(message in problem for problem in problems(tmp_path, text))


@pytest.mark.parametrize(
    "text",
    [
        "layout: {tp: 4}\nmodel: {n_heads: 4, n_kv_heads: 2}",
        "layout: {tp: 2}\nmodel: {n_heads: 12, n_kv_heads: 6, d_model: 96}",
        "layout: {tp: 4, sp: true, sp_regather: true}",
        "layout: {dp_shard: 2, zero: 2, accumulate: sharded}",
        "layout: {dp_shard: 2, tp: 2, zero: 3, reshard: false}",
        "layout: {dp_shard: 2, zero: 1}\ntrain: {compile: true}",
    ],
)
def test_sharded_layouts_that_go_together_are_legal(tmp_path, text):
    assert problems_of(load(tmp_path, text).job) == []


def test_the_rest_of_the_devices(tmp_path):
    text = "cluster: {nodes: 2, devices_per_node: 4}\nlayout: {dp_replicate: -1, tp: 2}"
    assert load(tmp_path, text).job.layout.dp_replicate == 4


def test_auto_begins_the_layout_anew_and_keeps_what_comes_with_it(tmp_path):
    loaded = load(tmp_path, "layout: {dp_replicate: 2, zero: 2}\n", ["layout=auto", "--tp", "2"])
    assert loaded.job.layout == Layout(auto=True, tp=2)
    assert loaded.origins["layout.zero"] == "default"
    assert loaded.origins["layout.auto"] == "command line: layout=auto"
    assert load(tmp_path, "layout: auto", ["--tp", "2"]).job.layout == Layout(auto=True, tp=2)
    assert load(tmp_path, "layout: {auto: true, tp: 2}").job.layout == Layout(auto=True, tp=2)
    assert load(tmp_path, "layout: {auto: true, tp: 2}", ["layout.auto=false"]).job.layout == Layout(tp=2)


@pytest.mark.parametrize(
    "argv",
    [["layout=auto"], ["--layout", "auto"], ["--layout=auto"], ["--auto"], ["auto=true"], ["layout.auto=yes"]],
)
def test_every_spelling_of_auto(tmp_path, argv):
    assert load(tmp_path, "layout: {dp_replicate: 2}\n", argv).job.layout == Layout(auto=True)


def test_a_run_may_be_named_after_its_layout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "tp=2").mkdir(parents=True)
    (tmp_path / "runs" / "tp=2" / "config.yaml").write_text("train: {steps: 7}")
    assert load_words(overrides.parse(["runs/tp=2/config.yaml"])).job.train.steps == 7
    assert overrides.parse(["runs/tp=3/config.yaml"]).problems


@pytest.mark.parametrize("argv", [["layout=tp=2,sp=true"], ["--layout", "tp=2,sp=true"], ["--layout=tp=2,sp=true"]])
def test_a_line_is_a_whole_layout(tmp_path, argv):
    for text in ("layout: {dp_replicate: 2, micro_batch: 3}", "layout: auto", "layout: auto,zero=1"):
        loaded = load(tmp_path, text, argv)
        assert loaded.job.layout == Layout(tp=2, sp=True)
    assert load(tmp_path, "layout: tp=2,sp=true").job.layout == Layout(tp=2, sp=True)
    assert load(tmp_path, "layout: auto,tp=2").job.layout == Layout(auto=True, tp=2)


def test_an_open_layout_is_checked_as_far_as_it_is_fixed(tmp_path):
    """What waits for the planner: the world, the batch, the pipeline, what goes together."""
    text = "cluster: dgx-h100\ntrain: {global_batch: 7}\nlayout: {auto: true, dp_replicate: 2, pp: 3, sync: diloco}"
    assert load(tmp_path, text).job.layout.pp == 3
    assert problems(tmp_path, "layout: {auto: true, tp: 3}") == [
        f"{tmp_path}/job.yaml:1: layout.tp: n_heads 4 / tp 3 and MLP width 512 / tp 3 are not integers; nearest tp: "
        "1, 2, 4",
    ]
    assert "must be at least 1, is 0" in problems(tmp_path, "layout: {auto: true, pp: 0}")[0]


def test_an_open_layout_survives_yaml(tmp_path):
    loaded = load(tmp_path, "train: {global_batch: 7}", ["layout=auto", "layout.micro_batch=2", "layout.zero=3"])
    settings, wrong = yaml_file.parse(as_yaml(loaded), "config.yaml")
    again = resolve(settings)
    assert (wrong, again.job) == ([], loaded.job)
    fixed = [path for path, origin in again.origins.items() if path.startswith("layout.") and origin != "default"]
    assert fixed == ["layout.auto", "layout.zero", "layout.micro_batch"]


def test_the_rest_of_the_devices_is_the_planners(tmp_path):
    loaded = load(tmp_path, "layout: {auto: true, dp_shard: -1}")
    assert (loaded.job.layout.dp_shard, loaded.origins["layout.dp_shard"]) == (1, "default")


def test_a_job_of_another_machine_is_read_without_its_presets(monkeypatch, tmp_path):
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path))
    job = replace(replace(Job(), "cluster.preset", "local"), "run.name", "x")
    assert from_dict(as_dict(job), "manifest") == job


def test_a_job_survives_yaml_and_json(tmp_path):
    loaded = load(tmp_path, "model: {preset: llama3-8b, n_layers: 2}\noptimizer: {betas: [0.8, 0.9]}\n", ["--lr=1e-4"])
    settings, wrong = yaml_file.parse(as_yaml(loaded), "config.yaml")
    assert wrong == []
    assert resolve(settings).job == loaded.job
    assert from_dict(as_dict(loaded.job), "manifest") == loaded.job


@given(st.sampled_from(sorted(PRESETS)), st.integers(1, 10**9), st.floats(1e-9, 1.0), st.text(max_size=20))
def test_any_values_survive_the_round_trip(preset, steps, lr, prompt):
    job = dataclasses.replace(Job(), model=dataclasses.replace(PRESETS[preset], preset=preset))
    for path, value in (("train.steps", steps), ("optimizer.lr", lr), ("run.sample_prompt", prompt), ("run.name", "x")):
        job = replace(job, path, value)
    assert from_dict(as_dict(job), "here") == job


@given(st.lists(st.text(max_size=12), max_size=4))
def test_no_words_make_the_command_line_crash(argv):
    words = overrides.parse(argv, {"json"})
    assert len(words.files) + len(words.settings) + len(words.problems) + len(words.switches) <= len(argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["checkpoint.every=100", "eval_every=40"],
            "every 100 is not a multiple of train.eval_every 40; nearest eval_every: 20, 25, 50",
        ),
        (["checkpoint.every=100"], "every 100 is not a multiple of train.eval_every 0"),
        (["eval_samples=0"], "the best checkpoint has the lowest validation loss, and eval_samples is 0"),
    ],
)
def test_the_best_checkpoint_needs_a_validation_at_every_save(tmp_path, argv, message):
    [problem] = problems(tmp_path, argv=["checkpoint.keep_best=true", *argv])
    assert message in problem
    assert not problems_of(load(tmp_path, argv=["keep_best=true", "checkpoint.every=100", "eval_every=50"]).job)


def test_home_is_replaced_in_paths_and_variables_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_words(overrides.parse(["run.dir=~/runs"])).job.run.dir == f"{tmp_path}/runs"
    with pytest.raises(JobError, match=r"run.dir=\$HOME/x: .*variables are not replaced here; write it out"):
        load_words(overrides.parse(["run.dir=$HOME/x"]))


def test_a_number_of_nodes_is_given_once(tmp_path):
    text, sharded = "cluster: {preset: 'dgx-h100:4', nodes: 2}\n", ["dp_shard=16", "train.global_batch=16"]
    [said] = problems(tmp_path, text, sharded)
    assert said.endswith("job.yaml:1: cluster.nodes: is 2, and cluster=dgx-h100:4 says 4")
    words = ["cluster=dgx-h100:4", "cluster.nodes=2"]
    assert "cluster.nodes=2: is 2, and cluster=dgx-h100:4 says 4" in problems(tmp_path, argv=[*words, *sharded])[0]
    assert load(tmp_path, "cluster: dgx-h100:4\n", ["cluster.nodes=2", *sharded]).job.cluster.nodes == 2


@pytest.mark.parametrize("text", ["null", "~", "'x'", '"x"', "[x]"])
@pytest.mark.parametrize("path", ["run.name", "data.path", "data.tokenizer", "model.from"])
def test_a_name_written_for_another_reader_is_one_problem(tmp_path, monkeypatch, path: str, text: str):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JobError) as caught:
        load_words(overrides.parse([f"{path}={text}", *(["data.corpus=text"] if path == "data.path" else [])]))
    assert len(caught.value.problems) == 1
    assert f"{text} would be a name" in str(caught.value) or f"{text}: expected one text" in str(caught.value)
    (tmp_path / "null").touch()
    if (path, text) == ("data.path", "null"):
        assert load_words(overrides.parse(["data.path=null", "data.corpus=text"])).job.data.path == "null"


def test_a_size_that_cannot_be_read_is_one_problem(tmp_path):
    text = "cluster: {preset: dgx-h100, nodes: 2.5}\nlayout: {dp_shard: 16}\n"
    assert problems(tmp_path, text) == [f"{tmp_path}/job.yaml:1: cluster.nodes: expected a whole number, found '2.5'"]


def test_auto_precision_follows_the_devices(tmp_path, monkeypatch):
    monkeypatch.setattr(techniques.clusters, "default_path", lambda: tmp_path / "local.yaml")
    figures = ("name=epyc", "fp32_tflops=0.2", "bandwidth_gbs=20", "memory_gib=8")
    rates = ["cluster.device=cpu", *(f"cluster.accelerator.{figure}" for figure in figures)]
    loaded = load(tmp_path, "train: {precision: auto}\n", [*rates, "cluster.accelerator.bf16_tflops=0.4"])
    assert loaded.job.train.precision == "bf16"
    why = "auto is bf16: epyc multiplies bf16 at 0.4 TFLOP/s, fp32 at 0.2"
    assert any(why in answer for answer in loaded.answers)
    assert loaded.origins["train.precision"].endswith(f"job.yaml:1 (auto: {why.partition(': ')[2]})")
    loaded = load(tmp_path, "train: {precision: auto}\n", [*rates, "cluster.accelerator.bf16_tflops=0.22"])
    assert loaded.job.train.precision == "fp32"
    monkeypatch.setattr(techniques, "BF16_INSTRUCTIONS", ())
    loaded = load(tmp_path, "train: {precision: auto}\n", ["cluster.device=cpu"])
    assert loaded.job.train.precision == "fp32"
    assert from_dict(as_dict(loaded.job), "run").train.precision == "fp32"
    (tmp_path / "local.yaml").write_text("cluster: {device: cpu, accelerator: {bf16_tflops: 0.4, fp32_tflops: 0.2}}\n")
    loaded = load(tmp_path, "train: {precision: auto}\n", ["cluster.device=cpu"])
    assert loaded.job.train.precision == "bf16"
    with pytest.raises(JobError, match="auto is for jobs that are loaded; nearest legal: "):
        raise JobError([f"{p}: {m}" for p, m in problems_of(replace(Job(), "train.precision", "auto"))])
