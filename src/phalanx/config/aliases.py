"""Names that ezpz, wordplay and nanoGPT have for the fields of a job: taken on the command line, and answered with the
field's own name and value. `foreign_names.py` has the names of other frameworks, which are only suggestions.

Sources: ezpz (examples/fsdp_tp.py, examples/test.py), wordplay (configs.py, conf/), nanoGPT (train.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Alias:
    """Another program's name for a field."""

    path: str
    """Dotted path of the field; of a rule, the field that it mainly sets, or empty."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Values with other names in that program, in lower case; others are the field's own."""
    nothing: Mapping[str, str] = field(default_factory=dict)
    """Values that ask for what happens anyway, with what happens. Others are refused, with foreign_names.ADVICE."""
    rule: bool = False
    """Whether the value depends on other fields, by the rule of this name in check/load.py."""


@dataclass(frozen=True)
class Derived:
    """A name with a rule, its value, and where it was written."""

    name: str
    text: str
    origin: str


_NAMES = {
    "model.d_model": "dim n_embd",
    "model.n_layers": "n_layer",
    "model.n_heads": "n_head",
    "model.d_ff": "hidden_dim",
    "model.seq_len": "block_size seq_length",
    "layout.accumulation": "gas",
    "layout.loss_chunk": "loss_chunk_size",
    "train.steps": "max_iters train_iters",
    "train.precision": "dtype",
    "train.log_every": "log_freq log_interval print_freq",
    "train.eval_every": "eval_interval",
    "optimizer.lr": "learning_rate",
    "optimizer.clip": "grad_clip max_grad_norm",
    "optimizer.warmup_steps": "warmup_iters",
    "optimizer.decay_steps": "lr_decay_iters",
    "data.corpus": "dataset",
    "data.text_field": "hf_text_column",
    "checkpoint.every": "save_interval",
    "checkpoint.background": "async_ckpt",
    "run.dir": "out_dir outdir",
}
_RECOMPUTE = Alias("layout.recompute", {"block": "full"})
_WANDB = Alias("run.trackers", {"true": "wandb", "false": "[]"})
ALIASES = {
    **{name: Alias(path) for path, names in _NAMES.items() for name in names.split()},
    "ac": _RECOMPUTE,
    "activation_checkpoint": _RECOMPUTE,
    "reshard_after_forward": Alias("layout.reshard", {"always": "true", "never": "false"}),
    "decay_lr": Alias("optimizer.schedule", {"true": "cosine", "false": "constant"}),
    "train.device": Alias("cluster.device"),
    "use_wandb": _WANDB,
    "wandb_log": _WANDB,
    # these depend on other fields
    "backend": Alias("", rule=True),
    "batch_size": Alias("layout.micro_batch", rule=True),
    "gradient_accumulation_steps": Alias("layout.accumulation", rule=True),
    "optimizer.gradient_accumulation_steps": Alias("layout.accumulation", rule=True),
    "min_lr": Alias("optimizer.min_lr_ratio", rule=True),
    "beta1": Alias("optimizer.betas", rule=True),
    "beta2": Alias("optimizer.betas", rule=True),
    "multiple_of": Alias("model.d_ff", rule=True),
    "ffn_dim_multiplier": Alias("model.d_ff", rule=True),
    "loss_impl": Alias("layout.loss_chunk", rule=True),
    # these have no field
    "train.framework": Alias("", nothing={"pytorch": "PyTorch is the framework"}),
    "eval_only": Alias("", nothing={"false": "a run trains"}),
    "init_from": Alias(
        "",
        nothing={
            "resume": "a run resumes from its own newest checkpoint",
            "scratch": "a new run begins with new weights",
        },
    ),
    "meta_init": Alias("", nothing=dict.fromkeys(("auto", "on"), "parameters are created on the meta device")),
    "compile_mode": Alias("", nothing={"default": "it is torch.compile's default mode"}),
    "num_workers": Alias("", nothing={"0": "a thread of each rank reads batches ahead (data.prefetch)"}),
}
"""Aliases by name, as it is written without its section, or with it where only that is unambiguous."""

SECTIONS = ("train", "model", "data", "optimizer")
"""Wordplay's sections, which may stand before an alias."""

FLAGS = {"fp32": ("train.precision", "fp32"), "no_reshard_after_forward": ("layout.reshard", "false")}
"""Options without a value: the field and the value that they set."""

SWITCHES = {"no_resume": "fresh"}
"""Options without a value that are a switch of a verb."""

GROUPS = {
    "experiment=shakespeare": {
        "model.preset": "baby",
        "data.corpus": "shakespeare_char",
        "layout.micro_batch": "64",
        "train.global_batch": "0",
        "train.steps": "10000",
        "train.precision": "bf16",
        "train.compile": "true",
        "train.log_every": "100",
        "train.eval_every": "250",
        "optimizer.lr": "1e-3",
        "optimizer.betas": "0.9,0.99",
        "optimizer.weight_decay": "0.1",
        "optimizer.clip": "1.0",
        "optimizer.warmup_steps": "100",
        "optimizer.decay_steps": "5000",
        "optimizer.min_lr_ratio": "0.1",
    }
}
"""Wordplay's groups of settings (conf/experiment). Other words of the command line win over them."""


def find(name: str) -> tuple[str, Alias] | None:
    """Returns an alias with its name in ALIASES, whether or not wordplay's section stands before it
    (`train.dtype`, `dtype`), or None."""
    section, _, last = name.replace("-", "_").rpartition(".")
    for known in (f"{section}.{last}", last):
        if known in ALIASES and (not section or section in SECTIONS):
            return known, ALIASES[known]
    return None
