"""LoRA adapters as PEFT saves them: adapter_config.json beside adapter_model.safetensors.

They are merged into the weights of their base as these are read, W + scale · B A with scale alpha / r, or alpha / √r
with use_rslora (Kalajdzievski 2023); rank_pattern and alpha_pattern name modules with their own r and alpha. What PEFT
computes otherwise is refused by the name of its field.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.bounded import kind_of, read_json
from phalanx.checkpoint.consolidated import SUFFIX, describe
from phalanx.checkpoint.manifest import Box, Manifest
from phalanx.checkpoint.shard_file import Reader
from phalanx.config.hugging_face.terms import ConfigReader, shown
from phalanx.config.model import ModelConfig
from phalanx.errors import CheckpointError
from phalanx.exchange.links import WeightFamily

WEIGHTS = f"adapter_model{SUFFIX}"
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_MOST_PROBLEMS = 20
_WITHOUT_EFFECT = (
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "inference_mode"),
    *("task_type", "revision", "auto_mapping", "peft_version", "megatron_core", "qalora_group_size", "eva_config"),
)
"""Fields that say which modules were adapted, which the tensors say, too, or how they were trained. Any other field
that is set is refused."""
_INITIAL = ("gaussian", "eva", "orthogonal")
"""Values of init_lora_weights, beside true and false, that leave the base as it is."""
_TRANSPOSED = ("gpt2",)
"""Kinds whose matrices are (inputs, outputs), for which PEFT sets fan_in_fan_out."""


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter's settings and the tensors of its file."""

    config: Path
    base: str
    """base_model_name_or_path: a folder, or a name on the hub."""
    rank: int
    alpha: float
    ranks: Mapping[str, int]
    """rank_pattern: the rank of modules whose names match an expression."""
    alphas: Mapping[str, float]
    """The same for alpha_pattern."""
    stabilised: bool
    """use_rslora."""
    transposed: bool
    """fan_in_fan_out."""
    saved: Sequence[str]
    """modules_to_save: modules whose tensors replace those of the base."""
    targets: Sequence[str]
    """target_modules where it is a list: modules with matrices of LoRA."""
    weights: Manifest

    def scale_and_rank(self, module: str) -> tuple[float, int]:
        """Returns the scale and the rank of a module. PEFT takes the first expression that matches the whole name, or
        its end from a dot on (peft/utils/other.py, get_pattern_key)."""
        [rank, alpha] = (
            next((value for key, value in each.items() if re.match(rf"(.*\.)?({key})$", module)), usual)
            for each, usual in ((self.ranks, self.rank), (self.alphas, self.alpha))
        )
        return alpha / rank ** (0.5 if self.stabilised else 1), int(rank)

    @property
    def local_base(self) -> Path | None:
        """The folder of the base, as it is named or from the adapter's own; None if it is not there."""
        named = Path(self.base)
        found = (path for path in (named, self.config.parent / named) if self.base and os.path.isdir(path))
        return next(found, None)


def open_adapter(config: Path) -> PeftAdapter:
    """Returns the adapter that an adapter_config.json describes. Raises CheckpointError with every field that is not
    plain LoRA, or if its tensors are missing or damaged."""
    try:
        values = read_json(config)
        if not isinstance(values, dict):
            raise ValueError(f"expected an object, found {kind_of(values)}")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{config} cannot be read: {error}") from None
    reader = ConfigReader(values)
    if (kind := reader.take("peft_type", str)) != "LORA" and not reader.problems:
        reader.problem("peft_type", f"is {shown(kind)}, supported: 'LORA'")
    rank, alpha = reader.take("r", int, 8), reader.take("lora_alpha", float, 8.0)
    ranks, alphas = (_pattern(reader, name, kind) for name, kind in (("rank_pattern", int), ("alpha_pattern", float)))
    if rank < 1:
        reader.problem("r", f"is {rank}, expected at least 1")
    if (biases := reader.take("bias", str, "none")) != "none":
        reader.problem("bias", f"is {shown(biases)}, supported: 'none'")
    initial = reader.raw("init_lora_weights")
    if not isinstance(initial, bool | None) and initial not in _INITIAL:
        reader.problem("init_lora_weights", f"is {shown(initial)}, which changes the base's weights, too")
    saved = reader.take("modules_to_save", list, [])
    stabilised = reader.take("use_rslora", bool, False)
    base, transposed = reader.take("base_model_name_or_path", str, ""), reader.take("fan_in_fan_out", bool, False)
    reader.seen |= {*_WITHOUT_EFFECT}
    for name in reader.left():
        if reader.raw(name):
            reader.problem(name, f"is {shown(reader.raw(name))}, which is not plain LoRA")
    if reader.problems:
        way = "merge it into its base with peft, merge_and_unload() and save_pretrained(DIR), and import DIR"
        raise CheckpointError("\n".join([*(f"{config}: {each}" for each in reader.problems), way]))
    weights, targets = _weights(config.parent), values.get("target_modules")
    targets = [*map(str, targets)] if isinstance(targets, list) else []
    return PeftAdapter(
        config, base, rank, alpha, ranks, alphas, stabilised, transposed, [*map(str, saved)], targets, weights
    )


def _pattern(reader: ConfigReader, name: str, kind: type) -> Mapping[str, Any]:
    """Returns an object of expressions with numbers, each of which is noted if it is wrong."""
    pattern = reader.inside(name)
    found: dict[str, Any] = {}
    for key in pattern.left():
        found[key] = pattern.take(key, kind, 1, least=1)
        try:
            re.compile(key)
        except re.error as error:
            pattern.problem(key, f"is no regular expression: {error}")
    return found


def _weights(folder: Path) -> Manifest:
    if not os.path.isfile(folder / WEIGHTS):
        pickled = os.path.isfile(folder / "adapter_model.bin")
        hint = "; adapter_model.bin is pickle, which can execute code: save it as safetensors" if pickled else ""
        raise CheckpointError(f"{folder}: there is no {WEIGHTS}{hint}")
    return describe(folder / WEIGHTS)


class AdaptedFiles(Reader):
    """The tensors of a base's files with an adapter merged into them, one at a time. Merged tensors have the widest
    type of their parts, fp32 at least: the reader rounds them once."""

    def __init__(self, base: Manifest, adapter: PeftAdapter, model_type: str, family: WeightFamily, model: ModelConfig):
        """Raises CheckpointError with every tensor of the adapter that does not fit the base."""
        super().__init__(base)
        self.adapter = adapter
        self._own, self._transposed = Reader(adapter.weights), model_type in _TRANSPOSED
        self._stored = {family.name_of(name): name for name in base.tensors}
        self._pairs: dict[str, dict[str, str]] = {}
        """Names of A and B by the stored name of their matrix."""
        self._whole: dict[str, str] = {}
        """Names of tensors that replace one of the base (modules_to_save)."""
        ends = {*family.theirs_of("head.weight"), *family.theirs_of("embed.weight")}
        self._tied = ends if model.tied else set()
        self.unused: list[str] = []
        """Tensors for parts of the base that are not imported."""
        problems = [*self._assign(family, model), *self._differences()]
        if adapter.transposed and not self._transposed:
            problems.append(f"{adapter.config}: fan_in_fan_out is true, which is for {', '.join(_TRANSPOSED)} only")
        if not problems and not self._pairs:
            problems.append(f"{self._file}: holds no adapter of a matrix of the base {base.path}")
        if problems:
            more = f"\nand {len(problems) - _MOST_PROBLEMS:,} more" if len(problems) > _MOST_PROBLEMS else ""
            raise CheckpointError("\n".join(problems[:_MOST_PROBLEMS]) + more)

    @property
    def note(self) -> str:
        """What was merged, for the user."""
        whole = f", {len(self._whole)} tensors replaced" if self._whole else ""
        unused = f", {len(self.unused)} tensors belong to what is not imported" if self.unused else ""
        own = self.adapter.weights.tensors
        lacking = [each for each in self.adapter.targets if _has(self.manifest.tensors, each) and not _has(own, each)]
        left = f"; there are no matrices of {', '.join(lacking)}, which target_modules names" if lacking else ""
        scales = ", ".join(f"{each:g}" for each in dict.fromkeys(self._scale(pair)[0] for pair in self._pairs.values()))
        return (
            f"merged the LoRA adapter {self.adapter.config.parent} into {len(self._pairs)} matrices of "
            f"{self.manifest.path} (scale {scales}{whole}{unused}){left}"
        )

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._own.open.clear()

    def read(self, name: str, box: Box | None = None) -> Tensor:
        if name in self._whole:
            return self._own.read(self._whole[name], box)
        tensor = super().read(name)
        if name in self._pairs:
            pair = self._pairs[name]
            a, b = self._own.read(pair[_A]), self._own.read(pair[_B])
            wide = reduce(torch.promote_types, (tensor.dtype, a.dtype, b.dtype, torch.float32))
            product = b.to(wide) @ a.to(wide)
            tensor = tensor.to(wide) + self._scale(pair)[0] * (product.mT if self._transposed else product)
        return tensor if box is None else tensor[box.within(Box.of(tensor.shape))]

    def _scale(self, pair: Mapping[str, str]) -> tuple[float, int]:
        """Returns the scale and the rank that the settings give to the module of two matrices."""
        return self.adapter.scale_and_rank(next(iter(pair.values())).removeprefix(_PREFIX).rpartition(".lora_")[0])

    @property
    def _file(self) -> Path:
        return self.adapter.weights.path / WEIGHTS

    def _assign(self, family: WeightFamily, model: ModelConfig) -> Iterator[str]:
        """Finds the base's tensor of each of the adapter's. Yields what belongs to none."""
        for stored in self.adapter.weights.tensors:
            name = stored.removeprefix(_PREFIX).replace(".modules_to_save.", ".")
            part = next((each for each in (_A, _B) if name.endswith(each)), "")
            plain = family.name_of(f"{name.removesuffix(part)}.weight" if part else name)
            if plain in self._tied:
                yield (
                    f"{self._file}: tensor {stored} changes {plain}, and the base's head is its embedding "
                    "(tie_word_embeddings), which would become two: merge it with peft"
                )
            elif plain not in self._stored:
                if not family.needs(plain, model) and "lora" not in plain:
                    self.unused.append(stored)
                else:
                    yield f"{self._file}: tensor {stored} belongs to no tensor of {self.manifest.path}"
            elif part:
                self._pairs.setdefault(self._stored[plain], {})[part] = stored
            else:
                self._whole[self._stored[plain]] = stored

    def _differences(self) -> Iterator[str]:
        """Yields adapters without one of their two matrices, and shapes that do not fit."""
        there = self.adapter.weights.tensors
        plain = [name for name in there if ".lora_" not in name]
        for module in self.adapter.saved:  # PEFT passes over those that the base does not have
            if _has(self.manifest.tensors, module) and not _has(plain, module):
                yield f"{self._file}: no tensor of {module}, which modules_to_save of {self.adapter.config.name} names"
        for name, stored in self._whole.items():
            if there[stored].shape != self.manifest.tensors[name].shape:
                yield f"{self._file}: tensor {stored} {there[stored].shape} does not fit {self._shape(name)}"
        for name, pair in self._pairs.items():
            if missing := {_A, _B} - pair.keys():
                yield f"{self._file}: {next(iter(pair.values()))} has no {missing.pop().removeprefix('.')}"
                continue
            a, b = (there[pair[part]].shape for part in (_A, _B))
            fits = len(a) == len(b) == 2 and a[0] == b[1]
            wanted = (a[1], b[0]) if self._transposed else (b[0], a[1])
            if not fits or wanted != self.manifest.tensors[name].shape:
                yield f"{self._file}: {pair[_A]} {a} and {pair[_B]} {b} do not fit {self._shape(name)}"
            elif a[0] != (rank := self._scale(pair)[1]):
                yield f"{self._file}: {pair[_A]} has rank {a[0]}, r and rank_pattern say {rank}"

    def _shape(self, name: str) -> str:
        return f"{name} {self.manifest.tensors[name].shape} of {self.manifest.path}"


def _has(names: Iterable[str], module: str) -> bool:
    """Returns whether there are tensors of a module of this name."""
    return any(f".{module}." in f".{name}" for name in names)
