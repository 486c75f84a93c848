"""GPT shapes from 125 million to 8 billion parameters, and the micro-batch that fits on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.gpu import commands
from benchmarks.gpu.setting import Setting

PREDICT_S = 120.0
MEMORY_FRACTION = 0.6
"""Fraction of a device's memory that a prediction may take: a plain loop has no chunked or sharded state."""


@dataclass(frozen=True)
class Shape:
    """A GPT: learned positions, LayerNorm, GELU, biases, and a head that is the embedding's transpose."""

    name: str
    layers: int
    width: int
    heads: int
    vocab: int = 50304
    """GPT-2's 50,257 tokens, padded to a multiple of 64."""
    seq_len: int = 2048

    @property
    def words(self) -> list[str]:
        """Returns overrides of a phalanx job."""
        return [
            f"model.n_layers={self.layers}",
            f"model.d_model={self.width}",
            f"model.n_heads={self.heads}",
            f"model.vocab_size={self.vocab}",
            f"model.seq_len={self.seq_len}",
            "model.activation=gelu_tanh",
        ]

    @property
    def flags(self) -> list[str]:
        """Returns options of benchmarks.gpu.plain_gpt and nanogpt."""
        named = {"layers": self.layers, "width": self.width, "heads": self.heads, "vocab": self.vocab}
        return [
            word for name, value in (named | {"seq-len": self.seq_len}).items() for word in (f"--{name}", str(value))
        ]


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
TINY = Shape("tiny", 2, 32, 2, vocab=64, seq_len=16)
"""The shape for a CPU, and for `--quick`."""
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
MICRO_BATCHES = (16, 8, 4, 2, 1)


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
    return max(memory["peak"] - memory["reserved"] for memory in prediction["memory_by_rank"])


def fitting(setting: Setting, shape: Shape) -> tuple[list[str], dict[str, Any]] | str:
    """Returns the layout words with the largest micro-batch that fits in ROOM of the memory, with recomputation if
    nothing else fits, and their prediction; or why nothing fits."""
    sizes = (2,) if shape is TINY else MICRO_BATCHES
    least = 0
    for recompute in ("none", "full"):
        for size in sizes:
            layout = [f"layout.micro_batch={size}", f"train.global_batch={size}", f"layout.recompute={recompute}"]
            prediction = predict(setting, shape, *layout)
            least = tensors(prediction)
            if least <= MEMORY_FRACTION * setting.memory:
                return layout, prediction
    return (
        f"{least / 2**30:.1f} GiB of tensors predicted for one sequence with recompute=full, more than "
        f"{MEMORY_FRACTION:.0%} of the device's {setting.memory / 2**30:.1f} GiB"
    )
