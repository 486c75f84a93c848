"""A Hugging Face folder: which of its files have the weights, and the headers of these, checked against config.json.

Only headers are read here, by the safetensors library, which checks that offsets lie inside of the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from phalanx.blocks.kinds import not_trained
from phalanx.bounded import read_json
from phalanx.check.start import ADAPTER
from phalanx.checkpoint.consolidated import INDEX, SUFFIX, describe
from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.shard_file import Reader
from phalanx.config.corpora import TOKENIZER_FILES
from phalanx.config.hugging_face import config_json
from phalanx.config.hugging_face.config_json import HuggingFaceModel
from phalanx.config.model import ModelConfig
from phalanx.config.precision import STORED
from phalanx.errors import CheckpointError, JobError, NotFoundError, RunError
from phalanx.exchange.hugging_face import WEIGHTS
from phalanx.exchange.links import WeightFamily
from phalanx.exchange.peft_adapter import WEIGHTS as ADAPTER_WEIGHTS
from phalanx.exchange.peft_adapter import AdaptedFiles, PeftAdapter, open_adapter
from phalanx.nearest import nearest

CONFIG = "config.json"
BESIDE = (
    *(CONFIG, "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.json", "chat_template.jinja"),
)
"""Small files that are kept with an imported run, for those who write the folder again."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class HuggingFaceFolder:
    """The files and tensors of a folder, or of a list of files."""

    config: Path
    described: HuggingFaceModel
    weights: Manifest
    """Every tensor with its file, from the headers."""
    tokenizer: Path | None
    beside: tuple[Path, ...]
    """Files of BESIDE."""
    adapter: PeftAdapter | None = None
    """The adapter to be merged into the weights."""

    @property
    def model_type(self) -> str:
        return self.described.family.model_type

    @property
    def own_head(self) -> str:
        """The name of a head that differs from the embedding though the model is tied; empty without one."""
        family = WEIGHTS[self.model_type]
        stored = {family.name_of(name): name for name in self.weights.tensors}
        ends = [stored.get(name) for ours in ("head.weight", "embed.weight") for name in family.theirs_of(ours)]
        if not self.described.model.tied or len(ends) < 2 or None in ends:
            return ""
        with Reader(self.weights) as files:
            head, embedding = (files.read(name) for name in ends if name)
            return "" if torch.equal(head, embedding) else str(ends[0])

    def _require_copies(self, family: WeightFamily, model: ModelConfig) -> None:
        """Raises CheckpointError for a module for a further token that has an embedding or a head of its own."""
        stored = {family.name_of(name): name for name in self.weights.tensors}
        pairs = ((*link.theirs, *family.theirs_of(link.ours[0])) for link in family.copies_in(model))
        there = [(stored[copy], stored[own]) for copy, own in pairs if copy in stored and own in stored]
        with Reader(self.weights) as files:
            wrong = [copy for copy, own in there if not torch.equal(files.read(copy), files.read(own))]
        if wrong:
            raise CheckpointError(
                f"{self.weights.path}: {', '.join(wrong)}: no copy of the model's own, which modules for further "
                f"tokens read here; leave the module out: --layers {model.main.n_layers}"
            )

    def files(self, model: ModelConfig) -> Reader:
        """Returns the tensors of the files of a model of this folder, with the adapter merged into them."""
        family = WEIGHTS[self.model_type]
        self._require_copies(family, model)
        if self.adapter is None:
            return Reader(self.weights)
        return AdaptedFiles(self.weights, self.adapter, self.model_type, family, model)


def open_folder(paths: Sequence[Path], ignored: Sequence[str] = (), base: Path | None = None) -> HuggingFaceFolder:
    """Returns what lies at `paths`: one folder, or the files themselves (config.json and safetensors, others if there
    are). Of an adapter of PEFT it is its base, with the adapter.

    Args:
        paths: a folder, or files.
        ignored: fields of config.json that are read as if they were absent.
        base: the folder of an adapter's base; by default that which its settings name.

    Raises CheckpointError, naming the file, if config.json is not understood, or if weights are missing, damaged or
    of a form that is not read; JobError for a base without an adapter."""
    files = _files(paths)
    config = next((file for file in files if file.name == CONFIG), None)
    settings = next((file for file in files if file.name == ADAPTER), None)
    adapter = open_adapter(settings) if settings else None
    if base and not adapter:
        raise JobError(f"--base {base} is for an adapter of PEFT: {', '.join(map(str, paths))} has no {ADAPTER}")
    if adapter and (base or config is None):
        return _with_base(adapter, files, ignored, base or adapter.local_base)
    if config is None:
        is_run = (paths[0] / "config.yaml").exists()
        own = "; it is a run already: model.from, generate and export take it" * is_run
        if gguf := next((file for file in files if file.suffix == ".gguf"), None):
            own = f"; {gguf} is imported by its own name"
        raise CheckpointError(f"{', '.join(map(str, paths))}: there is no {CONFIG}, which describes the model{own}")
    try:
        described = config_json.read_file(config, ignored)
    except JobError as error:
        raise CheckpointError("\n".join(error.problems)) from None
    if reason := not_trained(described.model):
        raise CheckpointError(f"{config}: {reason}; its weights cannot be read")
    if described.quantised:
        raise CheckpointError(
            f"{config}: quantization_config says that the weights are quantised, which are not read: import those in "
            "bf16, fp16 or fp32"
        )
    weights = _weights(files, paths)
    names = map(WEIGHTS[described.family.model_type].name_of, weights.tensors)
    described = described.with_modules(names)
    by_name = {file.name: file for file in files}
    beside = tuple(by_name[name] for name in BESIDE if name in by_name)
    return HuggingFaceFolder(config, described, weights, _tokenizer(files), beside, adapter)


def _with_base(
    adapter: PeftAdapter, files: Sequence[Path], ignored: Sequence[str], base: Path | None
) -> HuggingFaceFolder:
    """Returns an adapter's base with it. The tokenizer and what belongs to it are the adapter's own if it has some."""
    if base is None:
        hub = adapter.base.count("/") == 1 and not adapter.base.startswith((".", "/"))
        way = f"--base hub:{adapter.base} downloads it, " if hub else ""
        raise CheckpointError(
            f"{adapter.config}: base_model_name_or_path is {adapter.base!r}, which is no folder here: {way}--base DIR "
            "names it"
        )
    found = open_folder([base], ignored)
    if found.adapter:
        raise CheckpointError(f"{base}, the base of {adapter.config.parent}, has an adapter itself: merge that first")
    own = {file.name: file for file in files}
    beside = {file.name: file for file in found.beside} | {name: own[name] for name in BESIDE if name in own}
    tokenizer = _tokenizer(files) or found.tokenizer
    return replace(found, adapter=adapter, tokenizer=tokenizer, beside=tuple(beside.values()))


def _tokenizer(files: Sequence[Path]) -> Path | None:
    """Returns the file with the tokenizer; None without one."""
    return next((file for pattern in TOKENIZER_FILES for file in files if file.match(pattern)), None)


def _files(paths: Sequence[Path]) -> list[Path]:
    """Returns the files of a folder, or the files themselves with a config.json beside the first."""
    if len(paths) == 1 and os.path.isdir(paths[0]):
        try:
            return sorted(path for path in paths[0].iterdir() if path.is_file())
        except OSError as error:
            raise CheckpointError(f"{paths[0]} cannot be read: {error.strerror}") from None
    if missing := [str(path) for path in paths if not os.path.isfile(path)]:
        what = "a folder beside others" if any(map(os.path.isdir, missing)) else "no such file"
        hub = len(paths) == 1 and missing[0].count("/") == 1 and not os.path.exists(paths[0].parent)
        hint = f"; a model on the Hugging Face hub is hub:{missing[0]}" if hub else "; give one folder, or files"
        raise NotFoundError(f"{', '.join(missing)}: {what}{hint}")
    files = list(paths)
    config = files[0].parent / CONFIG
    if os.path.isfile(config) and all(file.name != CONFIG for file in files):
        files.append(config)
    return files


def _weights(files: Sequence[Path], paths: Sequence[Path]) -> Manifest:
    """Returns the weights: those of the index's files, or of model.safetensors, or of all safetensors files."""
    found = [file for file in files if file.name.endswith(SUFFIX) and file.name != ADAPTER_WEIGHTS]
    where = ", ".join(map(str, paths))
    if not found:
        pickles = [file.name for file in files if file.suffix in _PICKLES]
        if gguf := next((file for file in files if file.suffix == ".gguf"), None):
            raise CheckpointError(f"{where}: there are no safetensors files; {gguf} is imported by its own name")
        hint = f"; {pickles[0]} is pickle, which can execute code: convert it to safetensors first" if pickles else ""
        raise CheckpointError(f"{where}: there are no safetensors files{hint}")
    if len({file.parent for file in found}) > 1:
        raise CheckpointError(f"{where}: the safetensors files must lie in one folder")
    folder, names = found[0].parent, [file.name for file in found]
    index = next((file for file in files if file.name == f"model{INDEX}"), None)
    if index is not None:
        places = _indexed(index)
        wanted = set(places.values())
        if missing := sorted(wanted - set(names)):
            rest = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise CheckpointError(f"{index} names files that are not there: {', '.join(missing[:3])}{rest}")
        if f"model{SUFFIX}" in set(names) - wanted:
            raise CheckpointError(f"{index} does not name model{SUFFIX}, which stands beside it: remove one of the two")
        weights = describe(folder, sorted(wanted))
        if absent := [name for name in places if name not in weights.tensors]:
            raise CheckpointError(f"{index} names tensors that its files do not have: {', '.join(absent[:3])}")
        return weights
    if f"model{SUFFIX}" in names and len(paths) == 1:
        names = [f"model{SUFFIX}"]
    return describe(folder, names)


def _indexed(index: Path) -> dict[str, str]:
    """Returns the file of every tensor, as an index names them."""
    try:
        places = read_json(index)["weight_map"]
        if not places or not all(isinstance(name, str) and name.endswith(SUFFIX) for name in places.values()):
            raise ValueError("weight_map must name safetensors files")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} is no index of safetensors files: {error}") from None
    return places


def tensor_problems(
    weights: Manifest, names: dict[str, str], expected: dict[str, tuple[int, ...]], surplus: Sequence[str]
) -> Iterator[str]:
    """Yields what is wrong with the tensors of the files: missing ones, surplus ones, wrong shapes and types.

    Args:
        weights: the tensors of the files.
        names: the stored name of each tensor in the table's names.
        expected: the shapes by the table's names.
        surplus: stored names that nothing needs.
    """
    files = {box[0] for tensor in weights.tensors.values() for box in tensor.boxes}
    parts = [found for each in files if (found := re.fullmatch(r"(.+-)\d{5}(-of-(\d{5})\.safetensors)", each))]
    named = {f"{part[1]}{number:05d}{part[2]}" for part in parts for number in range(1, 1 + int(part[3]))}
    if expected.keys() - names.keys() and (absent := sorted(named - files)):
        yield f"{weights.path}: the numbers of its files say that there are more: {', '.join(absent[:3])}"
    for name, shape in expected.items():
        stored = names.get(name)
        if stored is None:
            meant = nearest(name, surplus)
            yield f"{weights.path}: tensor {name} {shape} is missing{f'; is it {meant}?' if meant else ''}"
            continue
        tensor = weights.tensors[stored]
        file = weights.path / tensor.boxes[0][0]
        if tensor.shape != shape:
            yield f"{file}: tensor {stored} is {tensor.shape} there, {shape} by {CONFIG}"
        elif tensor.dtype not in FLOATS:
            yield f"{file}: tensor {stored} has the type {tensor.dtype}, expected one of {', '.join(FLOATS)}"
    for stored in surplus:
        file = weights.path / weights.tensors[stored].boxes[0][0]
        yield f"{file}: tensor {stored} {weights.tensors[stored].shape} belongs to no parameter of this model"


FLOATS: Mapping[str, str] = {stored: name for name, stored in STORED.items()}
"""Types of weights in files, and their names in jobs."""


PREFIX = "hub:"
"""Begins the name of a model on the hub, so that no path is ever taken for one: nothing is downloaded unasked."""
PATTERNS = ("*.safetensors", "*.safetensors.index.json", *TOKENIZER_FILES, ADAPTER, *BESIDE)
"""The files that are downloaded: no pickle, no code."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[\w./-]+)?")


def downloaded(text: str) -> Path:
    """Returns the folder of the model `hub:OWNER/NAME`, or `hub:OWNER/NAME@REVISION`, downloaded if it is not in the
    cache. HF_HOME, HF_HUB_OFFLINE and HF_TOKEN hold as everywhere.

    Raises JobError if it is no name of a model, CheckpointError if the hub has no such model, RunError if it cannot be
    reached."""
    from huggingface_hub import snapshot_download  # imported here: half a second, and only this needs it
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    name = text.removeprefix(PREFIX)
    if not _NAME.fullmatch(name):
        raise JobError(f"{text}: no name of a model; write {PREFIX}OWNER/NAME, such as {PREFIX}openai-community/gpt2")
    repository, _, revision = name.partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=list(PATTERNS)))
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"{text}: the hub has no such model, or it is a gated one and HF_TOKEN is not set"
        ) from None
    except LocalEntryNotFoundError:
        reason = "is neither in the cache nor can the hub be reached (or HF_HUB_OFFLINE is set)"
    except (HfHubHTTPError, OSError) as error:
        reason = f"could not be downloaded: {str(error).splitlines()[0]}"
    raise RunError(
        f"{text} {reason}. Where there is a network: `hf download {repository} --local-dir DIR`; then, with DIR copied "
        "here: `phalanx import hf DIR --out RUN`"
    )
