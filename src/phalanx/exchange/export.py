"""Writes the model of a run as a Hugging Face folder: config.json, safetensors, tokenizer, generation settings.

    model.safetensors, or model-00001-of-00002.safetensors ... with model.safetensors.index.json
    config.json  generation_config.json  tokenizer.json  tokenizer_config.json  README.md

Tensors go one at a time from the checkpoint, whatever layout wrote it, to the folder, which is written under a hidden
name beside its own and renamed at the end. Small files that an import has left in the run (KEPT) are carried over.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from phalanx.blocks.parameters import parameter_shapes
from phalanx.bounded import parse_json, read_bytes
from phalanx.check.start import KEPT
from phalanx.checkpoint import consolidated
from phalanx.checkpoint.consolidated import numbered, plan
from phalanx.checkpoint.convert import as_type, merged, verify
from phalanx.checkpoint.manifest import MANIFEST, Manifest, StoredTensor, job_of
from phalanx.checkpoint.new_target import (
    MOST_FILE_BYTES,
    WrittenFiles,
    is_empty_folder,
    parent_problems,
    written_beside,
)
from phalanx.checkpoint.shard_file import Reader
from phalanx.config.corpora import JINJA_FILE, TOKENIZER_CONFIG
from phalanx.config.hugging_face import config_json
from phalanx.config.hugging_face.families import HARMLESS
from phalanx.config.model import ModelConfig
from phalanx.config.precision import STORED
from phalanx.data.files import Progress, meter, silent, write_atomic
from phalanx.data.template import Renderer, own_template
from phalanx.data.token_table import alphabet
from phalanx.data.tokenizer import FILE as TOKENIZER
from phalanx.data.tokenizer import ByteTokenizer, CharTokenizer, LibraryTokenizer, Tokenizer
from phalanx.errors import CheckpointError, JobError, PhalanxError
from phalanx.exchange.hugging_face import WEIGHTS
from phalanx.exchange.import_run import MOST_SMALL_BYTES
from phalanx.exchange.links import WeightLink, links, shapes_of_theirs
from phalanx.units import counted, gib

CONFIG, GENERATION = "config.json", "generation_config.json"
COPIED = ("special_tokens_map.json", "added_tokens.json", "chat_template.json", JINJA_FILE)
"""Small files about the tokenizer, which stay as they are."""
_TORCH_NAMES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
NOT_KEPT = {"auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "name_or_path"}
"""Fields of the imported config.json that are about that folder; auto_map names code to be run."""
_CONTEXT = "max_position_embeddings"
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class ExportResult(WrittenFiles):
    """The result of an export."""

    model_type: str
    reward: bool
    """Whether it is a reward model."""


_LOADERS = {
    False: ("AutoModelForCausalLM", "text-generation"),
    True: ("AutoModelForSequenceClassification", "text-classification"),
}
"""The class of transformers that loads a language or a reward model, and its task."""


@dataclass
class _Export:
    """An export in progress: its source, model and tokenizer."""

    source: Reader
    run: Path
    """The folder of the tokenizer and of what an import left."""
    model: ModelConfig
    tokenizer: Tokenizer | None
    notes: list[str]

    @property
    def context(self) -> int:
        """Tokens of the longest text: those of the imported model, since a job may train on shorter samples."""
        imported = self.side(CONFIG).get(_CONTEXT)
        if self.model.positions == "rope" and isinstance(imported, int):
            return max(self.model.seq_len, imported)
        return self.model.seq_len

    def side(self, name: str, folder: str = KEPT) -> dict[str, Any]:
        """Returns the content of a file that an import left, nothing if there is none. Raises CheckpointError."""
        path = self.run / folder / name
        try:
            found = parse_json(read_bytes(path, MOST_SMALL_BYTES), lenient=True)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
        return found if isinstance(found, dict) else {}


def export(
    source: Reader,
    target: Path,
    *,
    dtype: str = "",
    most_file_bytes: float = MOST_FILE_BYTES,
    progress: Progress = silent,
) -> ExportResult:
    """Writes the model of a checkpoint, with its adapters merged into it, to a new Hugging Face folder.

    Args:
        source: what `open_source` returns for a run, or for one of its checkpoints.
        target: the folder, which must not exist, or be empty.
        dtype: the type of the weights, one of STORED; their own if it is empty. Wider ones come from the optimizer's
            master weights if there are any.
        most_file_bytes: a larger model is divided into several files.
        progress: gets the bytes done.

    Raises JobError if the target is not empty, or if transformers cannot express the model, naming the fields;
    CheckpointError if the source is damaged or no run's; RunError if the target cannot be written.
    """
    if os.path.lexists(target) and not is_empty_folder(target):
        raise JobError(f"{target} exists and is not empty, and nothing is overwritten: name another folder")
    if problems := list(parent_problems(target)):
        raise JobError(problems)
    verify(source.manifest, progress)
    source = merged(source)
    manifest = source.manifest
    model = model_of(manifest)
    run = manifest.path.parent.parent if os.path.isfile(manifest.path / MANIFEST) else manifest.path
    work = _Export(source, run, model, Tokenizer.load(run) if os.path.isfile(run / TOKENIZER) else None, [])
    # Several model types may say all of a model, each with its own names of tensors: that of the import goes first.
    family, values = config_json.write(model, first=config_json.model_type_of(work.side(CONFIG)))
    source.require(parameter_shapes(model))
    names = WEIGHTS[family.model_type]
    weights = _Weights(source, model, [*links(model, names), *names.copies_in(model)], dtype)
    total = sum(tensor.nbytes for tensor in weights.tensors.values())
    config = _config(work, values, weights)
    with written_beside(target, total) as new:
        folder = new.directory
        planned = plan(weights.tensors, most_file_bytes, numbered("model"))
        consolidated.write(folder, planned, weights.read, None, meter(progress, "writing", total))
        if len(planned) > 1:
            _write_json(folder / f"model{consolidated.INDEX}", consolidated.index(planned))
        _write_json(folder / CONFIG, config)
        _write_json(folder / GENERATION, _generation(work))
        _write_tokenizer(work, folder)
        write_atomic(folder / "README.md", _card(work, config["architectures"][0], weights).encode())
        written = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    notes = (*work.notes, *_left_out(model))
    return ExportResult(
        target, manifest.step, len(weights.tensors), total, written, notes, family.model_type, model.reward
    )


class _Weights:
    """The tensors of a folder: their names and types, and their values, which are made when they are written."""

    def __init__(self, source: Reader, model: ModelConfig, all_links: list[WeightLink], dtype: str):
        self.source, self.model = source, model
        self.tensors: dict[str, StoredTensor] = {}
        self._links: dict[str, WeightLink] = {}
        self._last: tuple[WeightLink, Mapping[str, Tensor]] | None = None
        stored, shapes = source.manifest.tensors, parameter_shapes(model)
        for link in all_links:
            own = stored[link.ours[0]].dtype
            if link.conversion.widens and own == "F64":  # as an import left it: theirs have the type of the others
                own = stored[all_links[0].ours[0]].dtype
            kind = STORED[dtype] if dtype and own in STORED.values() else own
            for name, shape in shapes_of_theirs(link, model, shapes).items():
                self.tensors[name] = StoredTensor(shape, kind, ())
                self._links[name] = link

    @property
    def dtype(self) -> str:
        """The type of the first tensor, the embedding."""
        return next(iter(self.tensors.values())).dtype

    def read(self, name: str) -> Tensor:
        """Returns a tensor of theirs in its type."""
        link = self._links[name]
        if self._last is None or self._last[0] is not link:
            # Tensors of one link, such as all experts of a layer, follow each other.
            self._last = None  # not two of them in memory
            ours = [read_parameter(self.source, each, self.tensors[name].dtype) for each in link.ours]
            self._last = link, dict(zip(link.theirs, link.conversion.theirs(ours, self.model), strict=True))
        return as_type(self._last[1][name], self.tensors[name].dtype, f"{self.source.manifest.path}: {name}")


def read_parameter(source: Reader, name: str, dtype: str) -> Tensor:
    """Returns one of our parameters: what is exported is read here and nowhere else. For a wider type than its own it
    is the optimizer's master weight, if there is one."""
    stored, master = source.manifest.tensors, f"master/{name}"
    wider = master in stored and stored[name].dtype != dtype == stored[master].dtype
    return source.read(master if wider else name)


def model_of(manifest: Manifest) -> ModelConfig:
    vocabulary = manifest.meta.get("vocab_size")
    if "job" not in manifest.meta or not isinstance(vocabulary, int):
        raise CheckpointError(
            f"{manifest.path} has no job, which states the model: give a run, or one of its checkpoints"
        )
    return replace(job_of(manifest).model, vocab_size=vocabulary)


def _left_out(model: ModelConfig) -> Iterator[str]:
    """Yields what the model does here and not in transformers."""
    if model.reward:
        yield (
            "transformers scores a text at its last token that is not pad_token_id: set that in config.json for batches"
        )
    if model.warms_up:
        yield "sparse.dense_warmup=true attends to all keys here; transformers attends to those that are chosen"
    if model.moe.n_experts and model.moe.capacity:
        yield f"moe.capacity={model.moe.capacity:g} drops tokens here; transformers routes every token"


def _config(work: _Export, values: dict[str, Any], weights: _Weights) -> dict[str, Any]:
    """Returns config.json: what the model determines, over fields of the imported one that change no number. It is read
    back: raises JobError, naming the fields, if it says another model."""
    kept = {name: value for name, value in work.side(CONFIG).items() if name in HARMLESS - NOT_KEPT}
    longest = {_CONTEXT: work.context} if _CONTEXT in values else {}
    own = {"dtype": _TORCH_NAMES[weights.dtype], "use_cache": True}
    config = dict.fromkeys(_TOKEN_IDS) | kept | values | longest | own | _token_ids(work)
    if wrong := config_json.differences(config_json.read(json.loads(json.dumps(config))).model, work.model.main):
        raise JobError(f"the config.json of the export would be read as another model: {'; '.join(wrong)}")
    return config


def _token_ids(work: _Export) -> dict[str, Any]:
    """Returns the ids of special tokens: those of the imported model, or else the end that the tokenizer has."""
    known: dict[str, Any] = {}
    config = work.side(CONFIG)
    for imported in (config, work.side(GENERATION)):
        known |= {name: imported[name] for name in _TOKEN_IDS if imported.get(name) is not None}
    end = end_of_text(work.tokenizer) if work.tokenizer and not config else None
    return ({"eos_token_id": end[1]} if end else {}) | known


def _generation(work: _Export) -> dict[str, Any]:
    """Returns generation_config.json: that of the imported model, whose texts also end as answers do by the chat
    template that the run was trained on."""
    found = _token_ids(work) | work.side(GENERATION)
    template = None if "imported" in work.source.manifest.meta else own_template(work.run)
    if template is None or work.tokenizer is None:
        return found
    try:
        with Renderer(template) as renderer:
            end = renderer.answer_end().strip()
        [(ids, _)] = work.tokenizer.encode_marked([[(end, False)]])
    except (ValueError, PhalanxError) as error:
        work.notes.append(f"{template.origin}: how its answers end is not known: {error}")
        return found
    named = found.get("eos_token_id")
    ends = named if isinstance(named, list) else [] if named is None else [named]
    if len(ids) > 1:
        work.notes.append(f"answers end with {end!r}, which is no token of its own: generation stops only at that text")
    elif len(ids) == 1 and ids[0] not in ends:
        found["eos_token_id"] = [*ends, int(ids[0])]
    return found


def _write_tokenizer(work: _Export, folder: Path) -> None:
    if work.tokenizer is None:
        work.notes.append(f"no {TOKENIZER} in {work.run}, so none was written")
        return
    definition = library_definition(work.tokenizer)
    if definition is None:
        work.notes.append("the run's tokens have no tokenizer that transformers knows, so none was written")
        return
    write_atomic(folder / TOKENIZER, definition.encode())
    own = work.side(TOKENIZER_CONFIG) | work.side(TOKENIZER_CONFIG, "")
    for name in COPIED:
        for place in (work.run / name, work.run / KEPT / name):  # the run's own template first
            if os.path.isfile(place):
                write_atomic(folder / name, read_bytes(place, MOST_SMALL_BYTES))
                break
    if (folder / JINJA_FILE).exists():
        own.pop("chat_template", None)  # one of them, and the file counts
    _write_json(folder / TOKENIZER_CONFIG, settings(work.tokenizer, work.context, own))


def _card(work: _Export, architecture: str, weights: _Weights) -> str:
    """Returns README.md, a model card with what is known."""
    count = sum(tensor.elements for tensor in weights.tensors.values())
    loader, task = _LOADERS[work.model.reward]
    return f"""---
library_name: transformers
pipeline_tag: {task}
---

# {work.run.resolve().name}

Step {work.source.manifest.step:,} of a run of Phalanx: {architecture}, {count:,} parameters in \
{_TORCH_NAMES[weights.dtype]}.

    from transformers import {loader}, AutoTokenizer
    model = {loader}.from_pretrained("FOLDER", dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained("FOLDER")
"""


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_atomic(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def text_of(done: ExportResult) -> str:
    """Returns a line with the model, one per file, and how to load them."""
    width = max(map(len, done.files))
    size = f"{counted(done.tensors, 'tensor')}, {gib(done.bytes)}"
    lines = [f"{done.target}: {done.model_type}, step {done.step:,}, {size}"]
    lines += [f"  {name:<{width}}  {gib(size):>9}" for name, size in done.files.items()]
    return "\n".join([*lines, f'  load:  {_LOADERS[done.reward][0]}.from_pretrained("{done.target}", dtype="auto")'])


def document_of(done: ExportResult) -> dict[str, Any]:
    """Returns the document of `export --json`."""
    return {
        "target": str(done.target),
        "form": "hf",
        "model_type": done.model_type,
        "step": done.step,
        "tensors": done.tensors,
        "bytes": done.bytes,
        "files": done.files,
        "notes": list(done.notes),
    }


UNKNOWN = "<unk>"
_ANY_CHARACTER = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def library_definition(tokenizer: Tokenizer) -> str | None:
    """Returns a tokenizer.json of the `tokenizers` library that encodes and decodes as `tokenizer` does; None if the
    library has no such kind."""
    if isinstance(tokenizer, LibraryTokenizer):
        return tokenizer.definition()
    if isinstance(tokenizer, CharTokenizer):
        vocabulary = {character: number for number, character in enumerate(tokenizer.characters)}
        if tokenizer.unknown:
            vocabulary[UNKNOWN] = len(vocabulary)
        model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": UNKNOWN}
        return _definition(model, _ANY_CHARACTER, {"type": "Fuse"})
    return _of_bytes() if isinstance(tokenizer, ByteTokenizer) else None


def settings(tokenizer: Tokenizer, context: int, own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tokenizer_config.json: `own`, that of the imported tokenizer, with the model's `context` in tokens,
    and what any of the library's tokenizers needs."""
    end = end_of_text(tokenizer)
    usual: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    if end:
        usual["eos_token"] = end[0]
    if isinstance(tokenizer, CharTokenizer) and tokenizer.unknown:
        usual["unk_token"] = UNKNOWN
    return usual | dict(own)


def end_of_text(tokenizer: Tokenizer) -> tuple[str, int] | None:
    """Returns the token that ends a text, if the tokenizer has one."""
    if isinstance(tokenizer, LibraryTokenizer) and tokenizer.end:
        return tokenizer.end, tokenizer.separator[0]
    return None


def _of_bytes() -> str:
    """Byte-level BPE without merges: its alphabet has a printable character per byte."""
    model = {"type": "BPE", "vocab": {character: byte for byte, character in alphabet().items()}, "merges": []}
    return _definition(model, _BYTES, _BYTES)


def _definition(model: Mapping[str, Any], pre_tokenizer: Mapping[str, Any], decoder: Mapping[str, Any]) -> str:
    absent = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    parts = {"version": "1.0", "added_tokens": [], "pre_tokenizer": pre_tokenizer, "decoder": decoder, "model": model}
    return json.dumps(parts | absent, ensure_ascii=False)
