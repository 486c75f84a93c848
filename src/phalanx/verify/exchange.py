"""Proves that weights go in and out whole: import → export → import, bit by bit, and transformers' logits in float64.

A run is exported, imported and exported again; a Hugging Face folder is imported, exported and imported again. So each
side exists twice, and both pairs must be equal: the tensors of theirs, and the parameters of ours. A table of names
that is wrong in both directions passes that, so transformers also loads the folders and computes: its logits must be
ours.
Where they are not, the first layer that differs is known, and repairs of its parameters that make it right (one
transposed, two exchanged, …) name the tensor.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from phalanx.blocks.parameters import parameter_shapes
from phalanx.bounded import parse_json, read_bytes
from phalanx.check.start import ADAPTER, CONFIG, is_hugging_face
from phalanx.checkpoint.consolidated import open_source
from phalanx.checkpoint.convert import merged
from phalanx.checkpoint.diff import Values, values
from phalanx.checkpoint.manifest import MANIFEST, StoredTensor, kind_of
from phalanx.checkpoint.shard_file import Reader
from phalanx.config.hugging_face import config_json
from phalanx.config.hugging_face.families import HARMLESS
from phalanx.config.model import ModelConfig
from phalanx.data.files import Progress, silent
from phalanx.data.tokenizer import FILE as TOKENIZER
from phalanx.data.tokenizer import Tokenizer
from phalanx.errors import JobError, NotFoundError, PhalanxError
from phalanx.exchange.export import COPIED, GENERATION, NOT_KEPT, TOKENIZER_CONFIG, export, model_of
from phalanx.exchange.folder import HuggingFaceFolder, open_folder
from phalanx.exchange.hugging_face import WEIGHTS
from phalanx.exchange.import_run import MOST_SMALL_BYTES, import_folder
from phalanx.exchange.links import WeightFamily, links
from phalanx.model.transformer import Transformer
from phalanx.nearest import no_run
from phalanx.train.step import free_bytes
from phalanx.units import counted, finite, gib, listed
from phalanx.verify.measure import TOLERANCE

SEQUENCES, MOST_TOKENS = 2, 64
"""The shape of the random tokens whose logits are compared."""
SHARDS = 3
"""The first folder that is written has about as many files, so that an index is proved, too."""
MOST_NAMED = 20
_COPIES = 4
"""Models in float64 that stand in memory at a time: ours, theirs, and what loading takes."""
_WRITTEN_ANEW = NOT_KEPT | {"architectures", "model_type", "use_cache"}
_SAMPLE = "The quick brown fox, 12.5 % of it;\n\tdéjà vu 你好 <|endoftext|> "


class InFloat64(TorchFunctionMode):
    """Makes float64 of every float32 that the code asks for: transformers computes softmax, norms, rotary tables and
    routers in float32 whatever the type of its weights. What has no type of its own is float64, too."""

    def __enter__(self) -> InFloat64:
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:  # pyrefly: ignore[bad-override]
        super().__exit__(*error)
        torch.set_default_dtype(self._default)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        wide = [torch.float64 if value is torch.float32 else value for value in args]
        named = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return func(*wide, **named)  # pyrefly: ignore[bad-argument-type]


@dataclass
class ExchangeReport:
    """The result of the way in and out."""

    source: Path
    kind: str
    """run or folder: what lies at the source."""
    model_type: str = ""
    parameters: int = 0
    """Elements of the parameters of ours."""
    ours: int = 0
    """Parameters of ours that were compared."""
    theirs: int = 0
    """Tensors of theirs that were compared."""
    files: int = 0
    """Files of weights of the folder that was written first."""
    problems: list[str] = field(default_factory=list)
    """Messages about what is missing, extra or different, each with the name of the tensor, file or field."""
    left_out: list[str] = field(default_factory=list)
    """Tensors of the folder that no parameter needs: copies of a tied embedding, tables that are computed."""
    not_carried: list[str] = field(default_factory=list)
    """Files of the folder that do not travel along."""
    rounded: dict[str, float] = field(default_factory=dict)
    """Parameters whose difference from a constant (Gemma's 1 + w) has more digits than their type, and the error."""
    tokenizer: str = "none"
    """The tokenizer's fate in words: carried over, or why not."""
    logits_max_rel: float | None = None
    """Largest difference of a logit, relative to the largest logit; None if transformers did not compute."""
    no_logits: str = ""
    """Why it did not."""
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """Returns the document of `phalanx verify --exchange --json`."""
        return finite({**vars(self), "source": str(self.source), "tolerance": TOLERANCE, "ok": self.ok})

    def text(self) -> str:
        tensors = f"{counted(self.theirs, 'tensor')} of theirs and {counted(self.ours, 'parameter')} of ours"
        same = "not all equal" if self.problems else "equal to the bit, none missing, none extra"
        rel = self.logits_max_rel
        logits = self.no_logits or f"{rel:.1e} from transformers' in float64 (tolerance {TOLERANCE:g})"
        ways = {"run": "export → import → export", "folder": "import → export → import"}
        facts = {
            "model": f"{self.model_type}, {self.parameters:,} parameters",
            "way": f"{ways[self.kind]}, through {counted(self.files, 'file')} of weights and one",
            "tensors": f"{tensors}: {same}",
            "tokenizer": self.tokenizer,
            "logits": logits if rel is not None else f"not compared: {logits}",
            "rounded": f"{listed([*self.rounded], 3)}: by at most {max(self.rounded.values()):.0e}, "
            "since theirs is w of 1 + w and has the type of ours"
            if self.rounded
            else "",
            "left out": listed(self.left_out, 3),
            "not carried": listed(self.not_carried, 3),
        }
        lines = [str(self.source), *(f"  {name:<11}  {text}" for name, text in facts.items() if text)]
        lines += [f"  {'note':<11}  {note}" for note in self.notes]
        if self.problems:
            rest = len(self.problems) - MOST_NAMED
            lines += ["", "Differences:", *(f"  {each}" for each in self.problems[:MOST_NAMED])]
            lines += [f"  and {rest:,} more"] if rest > 0 else []
        verdict = "Not proved" if self.problems else "Proved"
        how = "to the bit, and its logits" if rel is not None else "to the bit; its logits were not compared"
        end = "" if self.problems else f" {how}"
        return "\n".join([*lines, "", f"{verdict}: what goes in comes out{end}"])


def prove(path: Path, progress: Progress = silent) -> ExchangeReport:
    """Proves the exchange of the run, or of the Hugging Face folder, at `path`.

    Raises NotFoundError if it is neither; CheckpointError for a folder that cannot be imported, naming the tensors;
    JobError, naming the fields, for a run whose model transformers cannot express."""
    report = ExchangeReport(path, _kind(path))
    with tempfile.TemporaryDirectory(prefix="phalanx_exchange_") as made:
        prove_it = _from_run if report.kind == "run" else _from_folder
        prove_it(report, Path(made), progress)
    return report


def _kind(path: Path) -> str:
    if path.suffix == ".gguf":
        raise JobError(f"{path}: a GGUF file is quantised and only imported: import it, and verify the run")
    if os.path.isfile(path / CONFIG) or os.path.isfile(path / MANIFEST):
        return "run"
    if is_hugging_face(path) or os.path.isfile(path / ADAPTER):
        return "folder"
    if not os.path.isdir(path):
        raise NotFoundError(no_run(path, "nothing"))
    raise NotFoundError(
        f"{path} is neither a run's directory (it has no config.yaml) nor a Hugging Face folder (it has no config.json)"
    )


class _StoppedError(Exception):
    """A way ends with a problem that is in the report."""


@contextmanager
def _reported(report: ExchangeReport, what: str) -> Iterator[None]:
    """Makes a problem of what our own program refuses in what it wrote itself."""
    try:
        yield
    except PhalanxError as error:
        lines = getattr(error, "problems", None) or str(error).splitlines()
        report.problems += [f"{what}: {line}" for line in lines]
        raise _StoppedError from None


def _from_run(report: ExchangeReport, made: Path, progress: Progress) -> None:
    with open_source(report.source) as opened:
        first = merged(opened)
        if "imported" in first.manifest.meta:
            report.notes.append(f"imported from {first.manifest.meta['imported'].get('from')}")
        written = export(first, made / "folder", most_file_bytes=_shard_bytes(first), progress=progress)
        report.model_type = written.model_type
        report.notes += _notes(written.notes)
        report.files = sum(name.endswith(".safetensors") for name in written.files)
        with suppress(_StoppedError):
            with _reported(report, "the export, imported"):
                import_folder([made / "folder"], made / "run", progress=progress)
                theirs = open_folder([made / "folder"])
            with open_source(made / "run") as second:
                _compare_ours(report, first, second)
                with _reported(report, "the import, exported again"):
                    export(second, made / "again", progress=progress)
                _compare_theirs(report, theirs, open_folder([made / "again"]))
            _compare_tokens(report, first.manifest.path.parents[1], made / "folder")
            _compare_files(report, theirs, made / "again")
        _compare_logits(report, first, made / "folder", made / "folder")


def _from_folder(report: ExchangeReport, made: Path, progress: Progress) -> None:
    done = import_folder([report.source], made / "run", progress=progress)
    theirs = open_folder([report.source])
    report.model_type, report.notes = done.model_type, _notes(done.notes)
    with open_source(made / "run") as first, suppress(_StoppedError):
        with _reported(report, "the import, exported"):
            written = export(first, made / "folder", most_file_bytes=_shard_bytes(first), progress=progress)
            report.files = sum(name.endswith(".safetensors") for name in written.files)
        with _reported(report, "the export, imported again"):
            import_folder([made / "folder"], made / "again", progress=progress)
        _compare_theirs(report, theirs, open_folder([made / "folder"]))
        with open_source(made / "again") as second:
            _compare_ours(report, first, second)
        _compare_files(report, theirs, made / "folder")
        _compare_tokens(report, made / "run", made / "folder")
    with open_source(made / "run") as first:
        if theirs.adapter:
            report.no_logits = "the folder is an adapter, merged into its base"
        else:
            _compare_logits(report, first, report.source, made / "folder")


def _notes(notes: Iterable[str]) -> list[str]:
    return [note for note in notes if TOKENIZER not in note]  # the report has a line about it


def _shard_bytes(source: Reader) -> float:
    return sum(each.nbytes for name, each in source.manifest.tensors.items() if not kind_of(name)) / SHARDS


def _compare_ours(report: ExchangeReport, first: Reader, second: Reader) -> None:
    """Compares the parameters of both runs."""
    family, model = WEIGHTS[report.model_type], model_of(first.manifest)
    widened = {name for link in links(model, family) if link.conversion.widens for name in link.ours}
    left, right = ({n: t for n, t in each.manifest.tensors.items() if not kind_of(n)} for each in (first, second))
    report.ours, report.parameters = len(left), sum(each.elements for each in left.values())
    for name, stored in left.items():
        if (other := right.get(name)) is None:
            report.problems.append(f"{name}: missing after export and import")
            continue
        a, b = first.read(name), second.read(name)
        b = b.to(a.dtype) if name in widened else b
        found = values(a, b) if a.shape == b.shape else None
        if found and name in widened and found.max_abs <= torch.finfo(a.dtype).eps:
            report.rounded[name] = found.max_abs
        elif found or (a.shape, a.dtype) != (b.shape, b.dtype):
            report.problems.append(f"{name}: {_difference(stored, other, found)} after export and import")
    report.problems += [f"{name}: appears after export and import" for name in right if name not in left]


def _compare_theirs(report: ExchangeReport, first: HuggingFaceFolder, second: HuggingFaceFolder) -> None:
    """Compares the tensors of both folders by the names of the table; those of the first that no parameter needs are
    left out."""
    family, model = WEIGHTS[report.model_type], second.described.model
    with first.files(first.described.model) as left, second.files(model) as right:
        places = {family.name_of(stored): stored for stored in left.names()}
        there = {family.name_of(stored): stored for stored in right.names()}
        _compare_fused(report, family, model, (left, places), (right, there))
        for name, stored in places.items():
            a = left.manifest.tensors[stored]
            if name not in there:
                if family.needs(name, model):
                    report.problems.append(f"{stored}: missing in the export")
                else:
                    report.left_out.append(stored)
                continue
            report.theirs += 1
            b = right.manifest.tensors[there[name]]
            found = None if a.shape != b.shape else values(left.read(stored), right.read(there[name]))
            if found or (a.shape, a.dtype) != (b.shape, b.dtype):
                report.problems.append(f"{stored}: {_difference(a, b, found)} in the export")
        copies = {name for link in family.copies_in(model) for name in link.theirs}
        added = (name for name in there if name not in places and name not in copies)
        report.problems += [f"{there[name]}: only in the export" for name in added]


def _compare_fused(
    report: ExchangeReport,
    family: WeightFamily,
    model: ModelConfig,
    first: tuple[Reader, dict[str, str]],
    second: tuple[Reader, dict[str, str]],
) -> None:
    """Compares experts that the first folder stores in one tensor per layer, and the second one by one; both with the
    names in the table of their tensors, of which those that are compared are taken."""
    (left, places), (right, there) = first, second
    stored = family.stored_in(left.names())
    if stored is family:
        return
    apart = {name: link for link in links(model, family) for name in link.ours}
    for link in links(model, stored):
        if link in apart.values():
            continue
        ours = link.conversion.ours([left.read(places.pop(name)) for name in link.theirs], model)
        report.theirs += len(link.theirs)
        for mine, tensor in zip(link.ours, ours, strict=True):
            other = apart[mine]
            theirs = [right.read(there.pop(name)) for name in other.theirs]
            if found := values(tensor, other.conversion.ours(theirs, model)[0]):
                report.problems.append(f"{link.theirs[0]}: differs by at most {found.max_abs:.1e} in the export")


def _difference(a: StoredTensor, b: StoredTensor, found: Values | None) -> str:
    if a.shape != b.shape:
        return f"{a.shape} is {b.shape}"
    if found is None:
        return f"{a.dtype} is {b.dtype}"
    place = ", ".join(map(str, found.at))
    return (
        f"{found.elements:,} of {a.elements:,} elements differ, by at most {found.max_abs:.1e} "
        f"([{place}] is {found.a:.6g}, becomes {found.b:.6g})"
    )


def _compare_files(report: ExchangeReport, first: HuggingFaceFolder, second: Path) -> None:
    """Compares config.json, the tokenizer and what goes with it."""
    again, before = config_json.read_file(second / "config.json"), first.described
    if first.own_head:
        report.notes.append("tie_word_embeddings is false in the export: the head is kept")
    elif wrong := config_json.differences(again.model, before.model.main):
        report.problems += [f"config.json: {each}" for each in wrong]
    folder = first.config.parent
    files = {each.name for each in folder.iterdir() if each.is_file() and not each.name.endswith(".safetensors")}
    there = {each.name for each in second.iterdir()}
    with_tokenizer = TOKENIZER in there
    for name in sorted(files - {"README.md", "model.safetensors.index.json"}):
        if name not in there:
            carried = name in COPIED or name in (TOKENIZER_CONFIG, GENERATION)
            if carried and with_tokenizer:
                report.problems.append(f"{name}: missing in the export")
            else:
                report.not_carried.append(name)
            continue
        old, new = (_json(each / name) for each in (folder, second))
        if name == "config.json":
            kept = HARMLESS - _WRITTEN_ANEW
            old = {} if before.in_images else {each: old[each] for each in kept if old.get(each) is not None}
        if name == TOKENIZER_CONFIG and "chat_template.jinja" in there:
            old.pop("chat_template", None)
        if name in ("config.json", TOKENIZER_CONFIG, GENERATION):
            report.problems += [
                f"{name}: {each} is {json.dumps(value)[:60]}, becomes {json.dumps(new.get(each))[:60]}"
                for each, value in old.items()
                if new.get(each) != value and each != "transformers_version"
            ]
        elif old != new:
            report.problems.append(f"{name}: differs in the export")


def _json(path: Path) -> Any:
    """Returns the content of a small file: of JSON its values, otherwise its bytes."""
    content = read_bytes(path, 2**30 if path.name == TOKENIZER else MOST_SMALL_BYTES)
    return parse_json(content, lenient=True) if path.suffix == ".json" else content


def _compare_tokens(report: ExchangeReport, run: Path, folder: Path) -> None:
    """Compares what a run's tokenizer makes of a text with what the exported one does."""
    if not os.path.isfile(run / TOKENIZER):
        return
    if not os.path.isfile(folder / TOKENIZER):
        report.tokenizer = "of a kind that transformers does not know: not exported"
        return
    report.tokenizer = "carried over"
    ours, theirs = Tokenizer.load(run), Tokenizer.load(folder)
    with suppress(PhalanxError, ValueError):  # a tokenizer of characters may not know these
        if ours.encode(_SAMPLE).tolist() != theirs.encode(_SAMPLE).tolist():
            report.problems.append(f"{TOKENIZER}: encodes another text otherwise than the run's")
    if ours.vocab_size != theirs.vocab_size:
        report.problems.append(f"{TOKENIZER}: {ours.vocab_size:,} tokens become {theirs.vocab_size:,}")


@torch.no_grad()
def _compare_logits(report: ExchangeReport, source: Reader, folder: Path, ours: Path) -> None:
    """Compares logits with those of transformers from `folder`, which must also take all of `ours`, our export."""
    need = _COPIES * 8 * report.parameters
    if importlib.util.find_spec("transformers") is None:
        report.no_logits = "transformers is not installed (pip install transformers)"
        return
    if need > (free := free_bytes(torch.device("cpu"))):
        report.no_logits = (
            f"in float64 they take {gib(need)}, {gib(free)} are free: import some --layers, and verify those"
        )
        return
    family, model = WEIGHTS[report.model_type], model_of(source.manifest)
    mine = _loaded(source, model)
    tokens = torch.randint(
        model.vocab_size, (SEQUENCES, min(MOST_TOKENS, model.seq_len)), generator=torch.Generator().manual_seed(1)
    )
    expected: list[Tensor] = []
    for path in dict.fromkeys((folder, ours)):
        if not os.path.isfile(path / "config.json"):
            continue
        try:
            theirs, info = _of_transformers(path)
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            report.problems.append(f"transformers cannot load {path.name}: {str(error).splitlines()[0]}")
            continue
        if path == ours:
            report.problems += [
                f"{name}: {what.replace('_', ' ')} by transformers"
                for what, names in info.items()
                for name in sorted(map(str, names))
                if family.needs(name, model.main)  # transformers has no modules for further tokens
            ]
        if path == folder:
            with InFloat64():
                found = theirs(tokens, use_cache=False, output_hidden_states=True)
            expected = [*found.hidden_states[:-1], found.logits]
    if expected:
        logits = mine(tokens)
        report.logits_max_rel = _relative(logits[:, -1] if model.reward else logits, expected[-1])
        if not report.logits_max_rel <= TOLERANCE:
            where = "the scores of sequences" if model.reward else _located(mine, tokens, expected)
            report.problems.append(f"logits differ from transformers' by {report.logits_max_rel:.1e}: {where}")


def _loaded(source: Reader, model: ModelConfig) -> Transformer:
    with torch.device("meta"):
        mine = Transformer(model, model.vocab_size).to(torch.float64)
    mine.to_empty(device="cpu")
    source.require(parameter_shapes(model))
    for name, parameter in mine.named_parameters():
        parameter.copy_(source.read(name))
    return mine.eval()


def _of_transformers(folder: Path) -> tuple[nn.Module, Mapping[str, Any]]:
    """Returns transformers' model in float64, computed eagerly, and what it says of missing and extra tensors."""
    # By name: a check of types would read all of its 2,800 files.
    transformers: Any = importlib.import_module("transformers")
    said, bars = transformers.logging, transformers.logging.is_progress_bar_enabled()
    level = said.get_verbosity()
    said.set_verbosity_error()
    said.disable_progress_bar()
    options: dict[str, Any] = {"attn_implementation": "eager", "dtype": torch.float64, "output_loading_info": True}
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if any("expert" in name for name in vars(config)):
        options["experts_implementation"] = "eager"
    try:
        with InFloat64():
            scores = any("SequenceClassification" in name for name in config.architectures or ())
            kind = transformers.AutoModelForSequenceClassification if scores else transformers.AutoModelForCausalLM
            found: Any = kind.from_pretrained(folder, local_files_only=True, **options)
    finally:
        said.set_verbosity(level)
        if bars:
            said.enable_progress_bar()
    if scores:  # a sequence's score is at its last token that is no padding: none of the vocabulary is
        found[0].config.pad_token_id = config.vocab_size
    return found[0].eval(), found[1]


def _relative(found: Tensor, expected: Tensor) -> float:
    scale = float(expected.abs().max()) or 1.0
    return float((found - expected).abs().max().nan_to_num(nan=math.inf)) / scale


def _located(mine: Transformer, tokens: Tensor, expected: list[Tensor]) -> str:
    """Returns where our numbers leave theirs: the first layer, and of its parameters those whose repair makes its
    output theirs. `expected` are what enters each layer, and the logits."""
    outputs: list[Tensor] = []

    def traced() -> list[Tensor]:
        outputs.clear()
        logits = mine(tokens)
        return [*outputs, logits]

    blocks = list(mine.blocks.values())
    hooks = [block.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0])) for block in blocks]
    try:
        wrong = [_relative(a, b) > TOLERANCE for a, b in zip(traced(), expected, strict=True)]
        first = wrong.index(True)
        part = {0: "embed", len(blocks): f"blocks.{len(blocks) - 1}"}.get(first, f"blocks.{first - 1}")
        names = [name for name, _ in mine.named_parameters() if name.startswith(f"{part}.")]
        if first == len(blocks):  # the last layer, or what follows it
            names += [name for name, _ in mine.named_parameters() if not name.startswith("blocks.")]
        parameters = dict(mine.named_parameters())
        for what, changed in _repairs({name: parameters[name] for name in names}):
            before = {name: parameters[name].clone() for name in changed}
            for name, value in changed.items():
                parameters[name].copy_(value)
            right = _relative(traced()[first], expected[first]) <= TOLERANCE
            for name, value in before.items():
                parameters[name].copy_(value)
            if right:
                return what
    finally:
        for hook in hooks:
            hook.remove()
    return f"first at the output of {part}, whose parameters are {', '.join(names)}"


def _repairs(parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yields what may be wrong with parameters, and the values that would then be right."""
    alone: dict[str, Callable[[Tensor], Tensor | None]] = {
        "is transposed": lambda t: t.mT if t.dim() > 1 and t.shape[-1] == t.shape[-2] else None,
        "has another sign": lambda t: -t,
        "has 1 too much": lambda t: t - 1 if t.dim() == 1 else None,
        "has 1 too little": lambda t: t + 1 if t.dim() == 1 else None,
        "has its experts in another order": lambda t: t.flip(0) if t.dim() == 3 else None,
    }
    for name, tensor in parameters.items():
        for what, repair in alone.items():
            if (repaired := repair(tensor)) is not None:
                yield f"{name} {what}", {name: repaired.clone()}
    for (name, a), (other, b) in combinations(parameters.items(), 2):
        if a.shape == b.shape:
            yield f"{name} and {other} are exchanged", {name: b.clone(), other: a.clone()}
