"""Shapes: GPTs from 125 million to 8 billion parameters, a Llama, a mixture; the micro-batch that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu import commands
from benchmarks.gpu.setting import Setting

PREDICT_S = 120.0
MEMORY_FRACTION = 0.6
"""Fraction of a device's memory that a prediction may take: a plain loop has no chunked or sharded state."""


MICRO_BATCHES = (16, 8, 4, 2, 1)


@dataclass(frozen=True)
class Shape:
    """A model of one kind; the contenders that have this kind take `flags`."""

    name: str
    layers: int
    width: int
    heads: int
    vocab: int = 50304
    """GPT-2's 50,257 tokens, padded to a multiple of 64."""
    seq_len: int = 2048
    kind: str = "GPT"
    """GPT: learned positions, LayerNorm, GELU, biases, and a head that is the embedding's transpose. Else the preset
    whose other fields the model has."""
    more: Mapping[str, int] = field(default_factory=dict[str, int])
    """Further fields of the model by name."""
    micro_batches: Sequence[int] = MICRO_BATCHES
    """What is tried, the largest first."""

    @property
    def words(self) -> list[str]:
        """Returns overrides of a phalanx job."""
        named = {"n_layers": self.layers, "d_model": self.width, "n_heads": self.heads, "vocab_size": self.vocab}
        named |= {"seq_len": self.seq_len, **self.more}
        kind = "model.activation=gelu_tanh" if self.kind == "GPT" else f"model={self.kind}"
        return [*(f"model.{name}={value}" for name, value in named.items()), kind]

    @property
    def flags(self) -> list[str]:
        """Returns options of the programs in the plain loop."""
        named = {"layers": self.layers, "width": self.width, "heads": self.heads, "vocab": self.vocab}
        named |= {"seq-len": self.seq_len}
        named |= {
            flag: self.more[name]
            for name, flag in (("n_kv_heads", "kv-heads"), ("d_ff", "hidden"))
            if name in self.more
        }
        return [word for name, value in named.items() for word in (f"--{name}", str(value))]


# Brown et al. 2020, table 2.1, up to 6.7B; the last one is as wide with more layers.
GPT = [
    Shape("125M", 12, 768, 12),
    Shape("350M", 24, 1024, 16),
    Shape("760M", 24, 1536, 16),
    Shape("1.3B", 24, 2048, 16),
    Shape("2.7B", 32, 2560, 32),
    Shape("6.7B", 32, 4096, 32),
    Shape("8B", 40, 4096, 32),
]
OTHERS = [
    Shape(
        "Llama 3 8B, 6 layers",
        6,
        4096,
        32,
        128256,
        8192,
        "llama3-8b",
        {"n_kv_heads": 8, "d_ff": 14336},
        micro_batches=(1,),
    ),
    Shape(
        "Qwen 3 30B-A3B, 4 layers", 4, 2048, 32, 151936, 4096, "qwen3-30b-a3b", {"n_kv_heads": 4}, micro_batches=(2,)
    ),
]
"""As many layers as one device holds: a whole model's products, attention and experts."""
TINY = Shape("tiny", 2, 32, 2, vocab=64, seq_len=16, micro_batches=(2,))
"""The shape for a CPU, and for `--quick`."""
TINY_OTHERS = [
    Shape("tiny Llama", 2, 32, 4, 64, 16, "llama3-8b", {"n_kv_heads": 2, "d_ff": 64}, micro_batches=(2,)),
    Shape(
        *("tiny mixture", 2, 32, 4, 64, 16, "qwen3-30b-a3b"),
        {"n_kv_heads": 2, "head_dim": 8, "moe.n_experts": 4, "moe.top_k": 2, "moe.d_ff": 32},
        micro_batches=(2,),
    ),
]
CLUSTERS = {
    "B200": "dgx-b200",
    "H200": "dgx-h200",
    "H100 PCIe": "h100-pcie",
    "H100": "dgx-h100",
    "A100-SXM4-80GB": "dgx-a100",
    "A100-SXM4-40GB": "dgx-a100-40gb",
    "V100": "dgx-v100",
}
"""Parts of device names as drivers report them, with the presets of machines that have them."""
DEFAULT_CLUSTER = "dgx-h100"
"""The cluster for predictions of memory, which is the same on every device."""


def training(setting: Setting, shape: Shape, *layout: str) -> list[str]:
    """Returns words of `phalanx train` and `predict` that only train a shape on random tokens."""
    return [
        *shape.words,
        f"train.precision={setting.precision}",
        f"cluster.device={setting.device}",
        *("data.corpus=random", f"data.random_vocab={shape.vocab}", "data.random_tokens=4_000_000"),
        *("optimizer.schedule=constant", "train.eval_samples=0", "train.log_every=1000", "run.sample_tokens=0"),
        *layout,
    ]


def predict(setting: Setting, shape: Shape, *layout: str, ranks: int = 1) -> dict[str, Any]:
    """Returns `phalanx predict --json` of a training job on `ranks` devices. Raises CaseError if it refuses."""
    machine = f"cluster={known(setting.name) or DEFAULT_CLUSTER}", f"cluster.devices_per_node={ranks}"
    words = commands.phalanx("predict", *training(setting, shape, *layout), *machine, "--json")
    return commands.answer(words, limit_s=PREDICT_S, codes=(0, 3))  # 3: does not fit that machine's devices


def known(name: str) -> str | None:
    """Returns the preset of a machine with devices of this name; None if there is none: no time is predicted then."""
    return next((preset for part, preset in CLUSTERS.items() if part in name), None)


def tensors(prediction: dict[str, Any]) -> int:
    """Predicted bytes of tensors, as torch.cuda.max_memory_allocated counts them, on the rank that has most."""
    return max(map(tensors_of, prediction["memory_by_rank"]))


def tensors_of(memory: dict[str, int]) -> int:
    """Predicted bytes of tensors of one rank."""
    return memory["peak"] - memory["reserved"]


def fitting(setting: Setting, shape: Shape) -> tuple[list[str], dict[str, Any]] | str:
    """Returns the layout words with the largest micro-batch that fits in ROOM of the memory, with recomputation if
    nothing else fits, and their prediction; or why nothing fits."""
    least = 0
    for recompute in ("none", "full"):
        for size in shape.micro_batches:
            layout = [f"layout.micro_batch={size}", f"train.global_batch={size}", f"layout.recompute={recompute}"]
            prediction = predict(setting, shape, *layout)
            least = tensors(prediction)
            if least <= MEMORY_FRACTION * setting.memory:
                return layout, prediction
    return (
        f"{least / 2**30:.1f} GiB of tensors predicted for one sequence with recompute=full, more than "
        f"{MEMORY_FRACTION:.0%} of the device's {setting.memory / 2**30:.1f} GiB"
    )
