"""Imports a Hugging Face folder as a run: one checkpoint at step 0 with config.yaml and the tokenizer.

Tensors go one link at a time from the files to the shard files: memory is bounded by two parameters, the one that is
read and the one before it, which is still being written. Experts of a layer are one parameter per matrix.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from phalanx.blocks.parameters import count, parameter_shapes
from phalanx.bounded import kind_of, parse_json, read_bytes
from phalanx.check.job import problems_of
from phalanx.check.load import as_dict
from phalanx.check.start import KEPT
from phalanx.checkpoint.convert import as_type
from phalanx.checkpoint.manifest import Box, Manifest, StoredTensor
from phalanx.checkpoint.new_target import target_problems, write_run, written_beside
from phalanx.checkpoint.parts import is_finite
from phalanx.checkpoint.shard_file import DTYPES, TORCH_DTYPES, Reader
from phalanx.config.corpora import TEMPLATE_FILES
from phalanx.config.job import Data, Job, Train
from phalanx.config.model import ModelConfig
from phalanx.config.precision import Precision
from phalanx.data.files import Progress, meter, silent, write_atomic
from phalanx.data.tokenizer import FILE as TOKENIZER
from phalanx.data.tokenizer import Tokenizer
from phalanx.errors import CheckpointError, JobError
from phalanx.exchange.folder import FLOATS, HuggingFaceFolder, open_folder, tensor_problems
from phalanx.exchange.hugging_face import WEIGHTS
from phalanx.exchange.links import WeightLink, links, shapes_of_theirs
from phalanx.exchange.peft_adapter import AdaptedFiles

_LINKS = 2
"""Links whose parameters are kept: weights and biases of queries, keys and values."""
MOST_SMALL_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Imported:
    """The result of an import."""

    target: Path
    model_type: str
    model: ModelConfig
    parameters: int
    precision: str
    bytes: int
    """Bytes of the parameters as stored."""
    tokens: int
    """Tokens of the tokenizer; 0 without one."""
    notes: tuple[str, ...]


class LinkedTensors(Reader):
    """The parameters of ours, one at a time from files of theirs, read like those of a checkpoint."""

    def __init__(
        self, files: Reader, model: ModelConfig, model_type: str, precision: str = "", left_out: range = range(0)
    ):
        """Checks names, shapes and types. Raises CheckpointError with everything that does not fit.

        Args:
            files: the tensors of the files.
            model: the shape by config.json.
            model_type: the key of WEIGHTS.
            precision: the type to which weights are converted: fp64, fp32, bf16 or fp16; empty keeps theirs.
            left_out: layers of the files that the model does not have.
        """
        self._model, self._files, weights = model, files, files.manifest
        family, shapes = WEIGHTS[model_type].stored_in(weights.tensors), parameter_shapes(model)
        self._to = {name: TORCH_DTYPES[stored] for stored, name in FLOATS.items()}[precision] if precision else None
        self._links: list[WeightLink] = list(links(model, family))
        expected = {
            name: shape for link in self._links for name, shape in shapes_of_theirs(link, model, shapes).items()
        }
        self._stored: dict[str, str] = {}
        twice, surplus = [], []
        for stored in weights.tensors:
            name = family.name_of(stored)
            if name not in expected:
                surplus += [stored] if family.needs(name, model) and layer_of(name) not in left_out else []
            elif name in self._stored:
                twice.append(f"{weights.path}: both {self._stored[name]} and {stored} are {name}")
            else:
                self._stored[name] = stored
        if problems := [*twice, *tensor_problems(weights, self._stored, expected, surplus)]:
            rest = f"\nand {len(problems) - 20:,} more" if len(problems) > 20 else ""
            raise CheckpointError("\n".join(problems[:20]) + rest)
        self._of = {name: link for link in self._links for name in link.ours}
        self._ready: dict[WeightLink, dict[str, Tensor]] = {}
        # In the order in which reading is cheapest.
        tensors = {
            name: StoredTensor(shapes[name], self._dtype(link, position), ())
            for link in self._links
            for position, name in enumerate(link.ours)
        }
        super().__init__(Manifest(weights.path, 0, True, {"vocab_size": model.vocab_size}, {}, tensors))

    def __exit__(self, *_: object) -> None:
        self._files.__exit__()
        self._ready.clear()

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Returns a parameter of ours, or a box of it. The parameters that come from the same tensors are asked for one
        after the other, so those of the last two links are kept."""
        link = self._of[name]
        found = self._ready.get(link) or self._converted(link)
        if len(link.ours) > 1:
            self._ready[link] = found
            if len(self._ready) > _LINKS:
                del self._ready[next(iter(self._ready))]
        tensor = found[name] if box is None else found[name][box.within(Box.of(found[name].shape))]
        return tensor.to(TORCH_DTYPES[self.manifest.tensors[name].dtype])

    def _converted(self, link: WeightLink) -> dict[str, Tensor]:
        # What was read of a file stays in memory as long as it is open.
        self._files.open.clear()
        theirs = _of_one_type([self._taken(each) for each in link.theirs])
        return dict(zip(link.ours, link.conversion.ours(theirs, self._model), strict=True))

    def _taken(self, name: str) -> Tensor:
        """Returns a tensor of theirs in the type to be stored. Raises CheckpointError if it is not finite in it."""
        stored = self._files.manifest.tensors[self._stored[name]]
        tensor = self._files.read(self._stored[name])
        whose = f"{self._files.manifest.path / stored.boxes[0][0]}: tensor {self._stored[name]}"
        if not is_finite(tensor):
            raise CheckpointError(f"{whose} holds NaN or infinity")
        kind = self._to or TORCH_DTYPES[stored.dtype]  # merged with an adapter, it is wider
        return tensor if tensor.dtype == kind else as_type(tensor, DTYPES[kind], whose)

    def _dtype(self, link: WeightLink, position: int) -> str:
        """Returns the type of a parameter: that of its tensors after conversion."""
        stored = [self._files.manifest.tensors[self._stored[name]] for name in link.theirs]
        theirs = [torch.empty(each.shape, dtype=self._to or TORCH_DTYPES[each.dtype], device="meta") for each in stored]
        return DTYPES[link.conversion.ours(_of_one_type(theirs), self._model)[position].dtype]


def _of_one_type(tensors: list[Tensor]) -> list[Tensor]:
    """Returns tensors in the type that holds all of them."""
    widest = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    return [tensor.to(widest) for tensor in tensors]


def import_folder(
    paths: Sequence[Path],
    target: Path,
    *,
    precision: str = "",
    layers: int = 0,
    ignore_config: Sequence[str] = (),
    base: Path | None = None,
    progress: Progress = silent,
) -> Imported:
    """Writes a new run at `target` from a Hugging Face folder, or from its files, or from an adapter of PEFT, merged
    into its base.

    Args:
        paths: the folder, or files (config.json and safetensors at least).
        target: the run's directory, which must not exist.
        precision: fp64, fp32, bf16 or fp16; empty keeps each tensor's type.
        layers: the first layers only; 0 means all.
        ignore_config: fields of config.json that are read as if they were absent.
        base: the folder of an adapter's base.
        progress: gets the bytes done.

    Raises JobError if the target exists; CheckpointError, with file and tensor, for what is missing, damaged or does
    not fit; DataError for a tokenizer that cannot be read; RunError if the target cannot be written. Nothing half
    written is left.
    """
    if problems := list(target_problems(target)):
        raise JobError(problems)
    folder = open_folder(paths, ignore_config, base)
    whole, untied = _with_own_head(folder)
    model = first_layers(whole, layers, folder.config)
    left_out = range(model.n_layers, whole.n_layers)
    found = [(path, problem) for path, problem in problems_of(Job(model=model)) if path.startswith("model.")]
    if found:
        raise CheckpointError("\n".join(f"{folder.config}: {path}: {problem}" for path, problem in found))
    kind, files = folder.model_type, folder.files(whole)
    notes = [*folder.described.notes, *untied, *([files.note] if isinstance(files, AdaptedFiles) else [])]
    tokenizer = Tokenizer.load(folder.tokenizer) if folder.tokenizer else None
    with LinkedTensors(files, model, kind, precision, left_out) as linked:
        incoming = Incoming(
            folder.config,
            kind,
            model,
            linked.manifest.tensors,
            linked.read,
            tokenizer,
            folder.tokenizer or folder.config,
            _small_files(folder),
        )
        return write_import(incoming, target, notes, progress)


def _with_own_head(folder: HuggingFaceFolder) -> tuple[ModelConfig, list[str]]:
    """Returns the model, untied if the files have a head that differs from the embedding, and what to say of it."""
    if not (head := folder.own_head):
        return folder.described.model, []
    note = f"{head} differs from the embedding, so it is kept: the model is untied, whatever tie_word_embeddings "
    return replace(folder.described.model, tied=False), [f"{note}says in {folder.config}"]


@dataclass(frozen=True)
class Incoming:
    """A model of another program, as it is to be stored in a run."""

    source: Path
    """The file that describes it."""
    model_type: str
    model: ModelConfig
    tensors: Mapping[str, StoredTensor]
    """Every parameter of ours in the type to be stored."""
    read: Callable[[str], Tensor]
    """Returns a parameter of ours in that type."""
    tokenizer: Tokenizer | None
    tokenizer_file: Path
    """The file that has the tokenizer."""
    small_files: Mapping[str, bytes]
    """Files of KEPT."""


def write_import(incoming: Incoming, target: Path, notes: list[str], progress: Progress) -> Imported:
    """Writes a new run at `target`. `notes` are what the user should know about the source.

    Raises CheckpointError for a tokenizer with tokens that the embedding lacks; RunError if the target cannot be
    written."""
    model, tokenizer = incoming.model, incoming.tokenizer
    notes = [*notes, *_about_tokenizer(incoming)]
    precision = _most_common(incoming.tensors)
    data = Data(tokenizer=str(target / TOKENIZER)) if tokenizer else Data()
    if model.reward:  # a job with one has pairs, which are not known here
        data = replace(data, corpus="preferences", path="pairs.jsonl", document_mask=False)
    job = Job(model=model, data=data, train=Train(precision=precision))
    total = sum(tensor.nbytes for tensor in incoming.tensors.values())
    manifest = Manifest(incoming.source.parent, 0, True, _meta(job, incoming), {}, {})
    with written_beside(target, total) as new:
        write_run(
            new.directory,
            target,
            manifest,
            job,
            incoming.tensors,
            incoming.read,
            meter(progress, "importing", total),
            origin=f"imported from {incoming.source}",
        )
        kept = new.directory / KEPT
        kept.mkdir()
        for name, content in incoming.small_files.items():
            write_atomic(kept / name, content)
            if name in TEMPLATE_FILES:
                write_atomic(new.directory / name, content)
        if tokenizer:
            tokenizer.save(new.directory)
    tokens = tokenizer.vocab_size if tokenizer else 0
    return Imported(target, incoming.model_type, model, count(model), precision, total, tokens, tuple(notes))


def _about_tokenizer(incoming: Incoming) -> Iterator[str]:
    """Yields what the user should know about the tokenizer. Raises CheckpointError if it has tokens that the embedding
    lacks."""
    tokenizer, rows = incoming.tokenizer, incoming.model.vocab_size
    if tokenizer is None:
        yield f"no {TOKENIZER}: phalanx generate needs one in the run's directory"
    elif tokenizer.vocab_size > rows:
        raise CheckpointError(
            f"{incoming.tokenizer_file}: the tokenizer has {tokenizer.vocab_size:,} tokens, the embedding has {rows:,} "
            f"rows (vocab_size, {incoming.source}): it does not belong to this model"
        )
    elif spare := rows - tokenizer.vocab_size:
        yield f"the embedding has {spare:,} rows more than the tokenizer's {tokenizer.vocab_size:,} tokens: padding"


def _most_common(tensors: Mapping[str, StoredTensor]) -> Precision:
    """Returns the precision of most bytes."""
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        sizes[tensor.dtype] += tensor.nbytes
    return cast(Precision, FLOATS[sizes.most_common(1)[0][0]])


def _meta(job: Job, incoming: Incoming) -> dict[str, Any]:
    """Returns what the checkpoint says of itself: enough to generate and to start from, not to resume."""
    return {
        "job": as_dict(job),
        "vocab_size": job.model.vocab_size,
        "imported": {"model_type": incoming.model_type, "from": str(incoming.source)},
    }


def _small_files(folder: HuggingFaceFolder) -> dict[str, bytes]:
    """Returns config.json and the like. Raises CheckpointError if one is too large, or no JSON."""
    found = {}
    for file in folder.beside:
        try:
            content = read_bytes(file, MOST_SMALL_BYTES)
            if file.suffix == ".json":
                values = parse_json(content, lenient=True)  # model_max_length may have 31 digits
                if not isinstance(values, dict):
                    raise ValueError(f"expected an object, found {kind_of(values)}")
                ends = values.get("eos_token_id") if file.name == "generation_config.json" else None
                if not all(type(each) is int for each in (ends if isinstance(ends, list) else [ends or 0])):
                    raise ValueError(f"eos_token_id is {ends!r}, expected the number of a token, or a list of numbers")
            found[file.name] = content
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from None
    return found


def first_layers(model: ModelConfig, layers: int, source: Path) -> ModelConfig:
    """Returns the shape of a model of its first `layers` layers, without modules for further tokens; of all if it is 0.
    Raises JobError if it has fewer."""
    model = model.main if layers else model
    if layers > model.n_layers:
        raise JobError(f"--layers {layers}: {source} has {model.n_layers} layers")
    return replace(model, n_layers=layers) if layers else model


def layer_of(name: str) -> int | None:
    """Returns the layer to which a tensor of transformers or of llama.cpp belongs, from 0; None for those outside."""
    found = re.search(r"(?:^|\.)(?:layers|h|blk)\.(\d{1,9})\.", name)
    return int(found[1]) if found else None
