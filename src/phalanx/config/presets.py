"""Known models by name, from models.json, with their sources. docs/reference/model.md counts their
parameters.

A job names a preset, and overrides its sequence length or any other field after that.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from phalanx.config.model import ModelConfig
from phalanx.config.values import Known, read_as
from phalanx.errors import JobError
from phalanx.nearest import nearest
from phalanx.registry import View


@dataclass(frozen=True)
class Preset:
    """A known model."""

    model: ModelConfig
    """The shape. Positions are those of the released configuration; seq_len is the length of samples in the main phase
    of pre-training if it is published, else the released context."""
    source: str
    """Paper or report with its table or section, and the file that states the numbers."""
    hub: tuple[str, ...] = ()
    """Repositories on the Hugging Face hub with this shape: the base model first."""
    context: int = 0
    """The longest context in tokens of the released configuration; 0 means seq_len."""
    note: str = ""
    """Features of the model that the shape omits, and facts that no source confirms."""


CATALOGUE: Mapping[str, Preset] = Known(
    "models.json", lambda name, entry: read_as(Preset, entry, f"models.json: {name}")
)
"""Every preset with its source, by name."""
PRESETS: Mapping[str, ModelConfig] = View(CATALOGUE, lambda name, preset: replace(preset.model, preset=name))
"""Known models by name; each carries its own name in `preset`."""

FROM_FILE = "hf:"
"""Begins the path of a Hugging Face config.json in place of a name, or of its folder."""


def preset_of(name: str, ignored: Sequence[str] = ()) -> Preset:
    """Returns what is known of a preset, or of the model of a config.json without its `ignored` fields:
    "hf:DIR/config.json", "hf:DIR". Raises JobError with the nearest name if it is unknown, or with everything that is
    wrong with the file."""
    if name.startswith(FROM_FILE):
        from phalanx.config.hugging_face import config_json

        path = Path(name.removeprefix(FROM_FILE))
        described = config_json.read_file(path / "config.json" if os.path.isdir(path) else path, ignored)
        return Preset(described.model, f"{path}, model_type {described.family.model_type}", note=described.note)
    if name not in CATALOGUE:
        raise JobError(f"no model preset {name!r}{unknown(name)}")
    return CATALOGUE[name]


def plain_name(name: str) -> str:
    """Returns a model's name in lower-case letters and digits, without the owner of a repository. A point between
    digits becomes p: qwen2.5-7b is not qwen2-57b."""
    return re.sub(r"[^a-z0-9]", "", re.sub(r"(?<=[0-9])\.(?=[0-9])", "p", name.lower().rpartition("/")[2]))


@lru_cache(1)
def _by_plain_name() -> dict[str, str]:
    """Returns presets by their plain names and those of their repositories."""
    by_hub = {plain_name(hub): name for name, preset in CATALOGUE.items() for hub in preset.hub}
    return by_hub | {plain_name(name): name for name in CATALOGUE}


def named(text: str) -> str:
    """Returns the preset that a text names: in other spelling ("Llama3.1_8B"), or as a repository on the Hugging Face
    hub ("meta-llama/Llama-3.1-8B"). Returns the text itself if it names none, or a file."""
    if not text or text.startswith(FROM_FILE):  # for the name of none all presets would be read
        return text
    return text if text in CATALOGUE else _by_plain_name().get(plain_name(text), text)


def likely(text: str) -> str | None:
    """Returns the preset that a wrong name most likely means, or None."""
    return nearest(text.lower().rpartition("/")[2], CATALOGUE)


def unknown(text: str) -> str:
    """Returns the end of a message about a wrong name: the likely preset, why there is no such kind, or the others of
    its family; and the command that lists all."""
    from phalanx.config.hugging_face.families import REFUSED

    name = text.lower().rpartition("/")[2]
    several = {kind for kind in REFUSED if len(_words(kind)) > 1 and plain_name(name).startswith(plain_name(kind))}
    kinds = [kind for kind in REFUSED if kind in several or _words(kind) == _words(name)[:1]]
    same = [known for known in CATALOGUE if _words(known)[0] == _words(name)[0]]
    kind = max(kinds, key=len, default="")  # of several words it is sure: qwen3-vl-8b is no slip of qwen3-8b
    if kind not in several and (meant := likely(text)):
        found = f"did you mean {meant}?"
    elif kind in several or (kind and not same):
        found = f"{kind}: {REFUSED[kind]};"
    else:
        found = f"there are {', '.join(same)};" if same else ""
    return f"; {found} `phalanx models` lists all" if found else "; `phalanx models` lists all"


def states_no_rows(model: ModelConfig) -> bool:
    """Returns whether a model's vocab_size is that of its preset's own tokenizer, or open, and so says nothing of the
    rows of an embedding for another tokenizer."""
    rows, preset = model.vocab_size, model.preset
    return not rows or preset.startswith(FROM_FILE) or (preset in PRESETS and PRESETS[preset].vocab_size == rows)


def _words(name: str) -> list[str]:
    return re.split("[-_ ]", name)


def gpt_kind(layers: int, width: int, heads: int, *, vocab: int, seq_len: int, **more: Any) -> ModelConfig:
    """Returns a GPT-2 kind: LayerNorm, learned positions, GELU, biases, a tied head; `more` are other fields."""
    kind: dict[str, Any] = {"activation": "gelu_tanh"}
    return ModelConfig(
        n_layers=layers, d_model=width, n_heads=heads, vocab_size=vocab, seq_len=seq_len, **(kind | more)
    )


def llama_kind(
    layers: int,
    width: int,
    heads: int,
    *,
    kv_heads: int,
    d_ff: int,
    vocab: int,
    seq_len: int,
    rope_theta: float,
    **more: Any,
) -> ModelConfig:
    """Returns a Llama kind: RMSNorm, rotary positions, SwiGLU, no biases, an untied head; `more` are other fields."""
    kind: dict[str, Any] = {
        "norm": "rmsnorm",
        "positions": "rope",
        "activation": "swiglu",
        "bias": False,
        "tied": False,
    }
    return ModelConfig(
        n_layers=layers,
        d_model=width,
        n_heads=heads,
        n_kv_heads=kv_heads,
        d_ff=d_ff,
        vocab_size=vocab,
        seq_len=seq_len,
        rope_theta=rope_theta,
        **(kind | more),
    )
