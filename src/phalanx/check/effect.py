"""Conditions under which a field has an effect: what a user sets where it has none is an error that names them.

Techniques state those of their own fields. Fields whose conditions are part of another rule are refused there:
optimizer options by check/job.py, kinds of layers by check/model.py."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import replace

from phalanx.blocks.kinds import chosen_kinds
from phalanx.config.corpora import CORPORA, TOKENIZERS, vocabulary_of
from phalanx.config.fields import get, leaves
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.presets import FROM_FILE, states_no_rows
from phalanx.partition.derived import has_buckets
from phalanx.techniques.catalogue import OWN, conditions_of
from phalanx.techniques.technique import Condition, Problem, above, is_one_of


def _used_by(kind: str) -> Condition:
    """Returns the condition that some layers have a kind of attention."""
    return lambda job: kind in chosen_kinds(job.model, "attention"), f"is for layers with attention {kind}"


_EXPERTS = above("model.moe.n_experts", what="models with experts: ")
_LATENT = above("model.mla.kv_rank", what="latent attention: ")
_SCALED = above("model.rope_scaling.factor", 1, "stretched rotary positions: ")
_STRETCHED = {
    "low_freq_factor": ("llama3",),
    "high_freq_factor": ("llama3",),
    "original_seq_len": ("llama3", "yarn", "longrope"),
    "magnitude": ("yarn", "longrope"),
    **dict.fromkeys(("beta_fast", "beta_slow", "truncate"), ("yarn",)),
    **dict.fromkeys(("short", "long"), ("longrope",)),
}
"""Fields of model.rope_scaling with the kinds that use them."""
_ROTARY: Condition = (
    lambda job: job.model.positions == "rope" or job.model.mla.kv_rank,
    "is for rotary positions: model.positions=rope",
)
_ROWS: Condition = (
    lambda job: CORPORA[job.data.corpus].rows is not None,
    "is for conversations: data.corpus=chat, preferences or prompts",
)
_OF_ROWS = ("template", "template_date", "loss_on", "too_long", "columns", "ignore_keys")
_PIPELINE = above("layout.pp", 1, "a pipeline: ", auto=True)
_GATHERED: Condition = (
    lambda job: (job.layout.zero == 3 and job.layout.shard_ranks > 1) or job.layout.auto,
    "is for parameters that are gathered: layout.zero=3, and layout.dp_shard or layout.cp above 1",
)
_BUCKETS: Condition = (
    lambda job: job.layout.auto or has_buckets(job.layout) or job.layout.compression != "none",
    "is for gradients that several processes sum in buckets: layout.dp_replicate above 1, or layout.dp_shard or "
    "layout.cp above 1 with layout.zero=1 or 2",
)
_SAVES: Condition = (
    lambda job: job.checkpoint.every and job.checkpoint.keep,
    "is for checkpoint.every above 0, and checkpoint.keep above 0 (0 keeps all)",
)
_SPIKES: Condition = (lambda job: job.guard.on_spike != "off", "is for guard.on_spike other than off")
_NODES: Condition = (lambda job: job.run.nnodes, "is for nodes with one Phalanx launcher each: run.nnodes")
_TEXT: Condition = (
    lambda job: CORPORA[job.data.corpus].tokens is None,
    "is for a corpus of text; that of this job is made of tokens",
)
_RANDOM: Condition = (lambda job: CORPORA[job.data.corpus].tokens is not None, "is for data.corpus=random")


def _vocabulary(job: Job) -> str:
    """Returns why model.vocab_size has no effect, or nothing; rows beside weights are a matter of check/start.py."""
    rows = job.model.vocab_size
    if job.model.from_ or not states_no_rows(job.model) or vocabulary_of(job.data) in (0, rows):
        return ""
    return (
        "is that of the preset's own tokenizer, and the embedding gets the rows of data.tokenizer; another number of "
        f"rows, such as {-(-(rows + 1) // 64) * 64}, pads it"
    )


_IN_BF16: Condition = (
    lambda job: job.optimizer.state == "bf16" or job.optimizer.master == "none",
    "is for what updates round to bf16: optimizer.state=bf16, or optimizer.master=none",
)
_DECAYS: Condition = (lambda job: job.optimizer.schedule != "constant", "is for a schedule that decays: not constant")

CONDITIONS: dict[str, Condition] = {
    "cluster.carbon_g_per_kwh": above("cluster.power_w"),
    "model.ignore_config": (
        lambda job: job.model.from_ or job.model.preset.startswith(FROM_FILE),
        "is for a config.json: model.from a Hugging Face folder, or model=hf:FILE",
    ),
    **{path: _EXPERTS for path in leaves() if path.startswith("model.moe.") and path != "model.moe.n_experts"},
    "model.moe.z_loss": (
        _EXPERTS[0],
        f"{_EXPERTS[1]} (it is the router's; a z-loss of the logits is not implemented)",
    ),
    "model.double_mlp": above("model.shared_keys"),
    "train.mtp_weight": above("model.mtp", what="modules for further tokens: "),
    "model.moe.bias_rate": (
        lambda job: job.model.moe.n_experts and job.model.moe.bias_balanced,
        "is for model.moe.bias_balanced=true",
    ),
    "model.moe.top_groups": (
        lambda job: job.model.moe.n_experts and job.model.moe.n_groups > 1,
        "is for experts in groups: model.moe.n_groups above 1",
    ),
    **{path: _LATENT for path in leaves() if path.startswith("model.mla.") and path != "model.mla.kv_rank"},
    **{
        path: _used_by(kind)
        for kind in ("sparse", "delta", "mamba", "wide_heads")
        for path in leaves()
        if path.startswith(f"model.{kind.removesuffix('_heads')}.")
    },
    "model.moe.shared_gate": above("model.moe.n_shared", what="shared experts: "),
    "model.rope_scaling.kind": _SCALED,
    **{
        f"model.rope_scaling.{name}": (
            lambda job, kinds=kinds: _SCALED[0](job) and job.model.rope_scaling.kind in kinds,
            f"{_SCALED[1]}, and model.rope_scaling.kind={' or '.join(kinds)}",
        )
        for name, kinds in _STRETCHED.items()
    },
    "model.d_ff": (
        lambda job: (
            not (job.model.moe.n_experts and job.model.moe.d_ff)
            or job.model.moe.n_dense_layers
            or job.model.feed_forward
        ),
        "is for dense MLPs, of which model.moe.n_dense_layers=0 leaves none; model.moe.d_ff is that of an expert",
    ),
    "model.qkv_bias": (lambda job: not job.model.bias, "is for model.bias=false; model.bias gives biases to all"),
    "model.rope_scaling.factor": _ROTARY,
    "model.rope_theta": _ROTARY,
    "model.rotary_fraction": _ROTARY,
    "model.rotary_pairs": _ROTARY,
    "model.nope_every": _ROTARY,
    "model.window": (
        lambda job: any(map(job.model.window_of, range(job.model.n_layers))),
        "is for layers with a window, of which model.full_every=1, or a pattern of full alone, leaves none",
    ),
    "model.full_every": (
        lambda job: job.model.full_every <= job.model.n_layers,
        "is for models of at least as many layers: no layer attends to all keys",
    ),
    "model.window_kind": above("model.window"),
    **{f"model.query_growth.{name}": above("model.query_growth.rate") for name in ("length", "first")},
    "layout.zero": (
        lambda job: job.layout.shard_ranks > 1 or job.layout.auto,
        "is for state that ranks share: layout.dp_shard or layout.cp above 1",
    ),
    "layout.bucket_mb": _BUCKETS,
    **{f"layout.{name}": above("layout.tp", 1, "tensor parallelism: ", auto=True) for name in ("sp", "etp")},
    "layout.ep_node": above("layout.ep", 1, "expert parallelism: ", auto=True),
    "layout.cp_inner": (
        lambda job: 1 < job.layout.cp_ulysses < job.layout.cp or job.layout.auto,
        "is for a ring of Ulysses groups: layout.cp_ulysses above 1 and below layout.cp",
    ),
    "layout.cp_balance": (
        lambda job: (job.layout.cp > 1 and job.data.document_mask) or job.layout.auto,
        "is for documents over context-parallel ranks: data.document_mask=true, and layout.cp above 1",
    ),
    **{f"layout.{name}": _PIPELINE for name in ("schedule", "pp_chunks", "pp_slices", "pp_cut")},
    **{f"layout.{name}": _GATHERED for name in ("reshard", "prefetch")},
    **{f"guard.{name}": _SPIKES for name in ("spike_norm", "spike_loss", "spike_window", "spike_warmup")},
    "data.document_tokens": (lambda job: job.data.document_mask, "is for data.document_mask=true"),
    "data.readers": (
        lambda job: job.layout.sync != "asp" and job.layout.data_parallel != "threads",
        "is for ranks that take steps together: neither layout.sync=asp nor data_parallel=threads",
    ),
    "checkpoint.keep": (
        lambda job: job.checkpoint.every or job.checkpoint.every_minutes,
        "is for checkpoints before the end: checkpoint.every or checkpoint.every_minutes above 0",
    ),
    "checkpoint.memory_every": (
        lambda job: job.run.max_restarts or job.run.nnodes,
        "is for runs that restart: run.max_restarts above 0, or run.nnodes",
    ),
    "checkpoint.keep_every": _SAVES,
    "checkpoint.keep_best": _SAVES,
    "run.restart_window_s": above("run.max_restarts"),
    "run.rdzv_endpoint": _NODES,
    "run.node_lost_s": _NODES,
    "run.metrics_host": above("run.metrics_port"),
    "run.trackers_wait_s": (lambda job: job.run.trackers, "is for run.trackers"),
    "optimizer.decay_fraction": is_one_of("optimizer.schedule", "wsd"),
    "optimizer.rounding": _IN_BF16,
    "optimizer.decay_steps": _DECAYS,
    "optimizer.min_lr_ratio": _DECAYS,
    "optimizer.base_batch": is_one_of("optimizer.batch_scaling", "linear", "sqrt"),
    "data.path": (
        lambda job: "path" in CORPORA[job.data.corpus].settings,
        "is for corpora that read files of your own",
    ),
    "data.text_field": (
        lambda job: (
            "text_field" in CORPORA[job.data.corpus].settings or any(each.corpus == "text" for each in job.data.mix)
        ),
        "is for data.corpus=text",
    ),
    **{f"data.{name}": _ROWS for name in _OF_ROWS},
    "data.random_tokens": _RANDOM,
    "data.random_vocab": _RANDOM,
    "data.tokenizer": _TEXT,
    **{f"data.{name}": _TEXT for name in ("workers", "limit_mb", "packing")},
    "data.skip_quota": is_one_of("data.on_corruption", "skip"),
    "train.eval_every": above("train.eval_samples"),
    "data.bpe_vocab": (
        lambda job: job.data.tokenizer in TOKENIZERS and "bpe_vocab" in TOKENIZERS[job.data.tokenizer].settings,
        "is for data.tokenizer=bpe",
    ),
    "run.sample_prompt": above("run.sample_tokens"),
    **{path: each for technique in OWN.values() for path, each in technique.conditions.items()},
}
"""The fields that have an effect only sometimes, with their conditions."""


def effect_problems(job: Job, given: Set[str]) -> Iterator[Problem]:
    """Yields each field that the user set (`given`: dotted paths) to another value than its default, and that has no
    effect in this job."""
    default = Job()
    for path, (holds, when) in {**CONDITIONS, **conditions_of(job)}.items():
        if path in given and get(job, path) != get(default, path) and not holds(job):
            yield path, f"has no effect here: it {when}"
    if "model.vocab_size" in given and job.model.vocab_size and (why := _vocabulary(job)):
        yield "model.vocab_size", f"has no effect here: it {why}"


_INTERVALS = {
    "train.eval_every": "the model is validated only at the end",
    "train.log_every": "only the first step is logged",
    "checkpoint.every": "before the end only checkpoint.every_minutes and a stop save",
    "checkpoint.memory_every": "no copy of the state is kept in memory",
    "checkpoint.keep_every": "no checkpoint is kept for ever",
    "guard.every": "replicas are never compared",
    "guard.repeat_every": "no step is repeated",
    "layout.sync_every": "replicas are averaged only at the end",
    "layout.compression_start": "no gradient is compressed",
    "guard.spike_warmup": "no spike is looked for",
}
"""Fields of steps that may lie beyond the end of a run, and what follows."""


def never_reached(job: Job, given: Set[str]) -> Iterator[Problem]:
    """Yields each field that the user set to more steps than the run has."""
    for path, outcome in _INTERVALS.items():
        if path in given and get(job, path) > job.train.steps:
            yield path, f"train.steps={job.train.steps:,} does not reach step {get(job, path):,}: {outcome}"


def without_idle(job: Job) -> Layout:
    """Returns the layout with the defaults of fields that have no effect in the job: a line that may be given again."""
    idle = {path for path, (holds, _) in CONDITIONS.items() if path.startswith("layout.") and not holds(job)}
    names = {path.rpartition(".")[2] for path in idle}
    return replace(job.layout, **{name: getattr(Layout(), name) for name in names})
