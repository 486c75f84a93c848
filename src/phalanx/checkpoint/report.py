"""Checkpoints, conversions and differences as text for people and as documents for programs. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.checkpoint.inventory import Listed, Listing, Retention, age_of, layout_of, precision_of
from phalanx.checkpoint.manifest import Box, Manifest, StoredTensor, kind_of
from phalanx.units import aligned, counted, gib, seconds

if TYPE_CHECKING:
    from phalanx.checkpoint.convert import Converted
    from phalanx.checkpoint.diff import StateDifference, TensorDifference

LONGEST_VALUE = 60


def listing(found: Listing) -> str:
    """Returns the table of a run's checkpoints, with what is wrong with damaged ones below it."""
    if not found.checkpoints:
        return "\n".join([f"{found.root}: no checkpoint yet", *_unfinished(found)])
    rows = [("step", "age", "size", "state", "val_loss", "layout", "")]
    for each in found.checkpoints:
        age = "" if each.age_s is None else seconds(each.age_s)
        loss = "" if each.val_loss is None else f"{each.val_loss:.4f}"
        rows.append(
            (str(each.found.step), age, gib(each.bytes), _state(each), loss, each.layout, ", ".join(each.notes))
        )
    whole = sum(each.found.manifest is not None for each in found.checkpoints)
    total = gib(sum(each.bytes for each in found.checkpoints))
    lines = [f"{found.root}: {counted(len(found.checkpoints), 'checkpoint')}, {whole} whole, {total}"]
    lines += ["", *aligned(rows, "rrrlrll")]
    if wrong := [f"  {each.found.error}" for each in found.checkpoints if each.found.error]:
        lines += ["", *wrong]
    return "\n".join([*lines, "", _retention(found), *_unfinished(found)])


def listing_document(found: Listing) -> dict[str, Any]:
    """Returns the document of `list --json`."""
    policy = found.policy
    return {
        "root": str(found.root),
        "bytes": sum(each.bytes for each in found.checkpoints),
        "retention": {"keep": policy.keep, "keep_every": policy.keep_every, "keep_best": policy.keep_best}
        if policy
        else None,
        "checkpoints": [
            {
                "step": each.found.step,
                "path": str(each.found.path),
                "age_s": each.age_s,
                "bytes": each.bytes,
                "whole": each.found.manifest is not None,
                "problem": str(each.found.error) if each.found.error else None,
                "layout": each.layout or None,
                "val_loss": each.val_loss,
                **{name.replace(" ", "_"): name in each.notes for name in ("latest", "best", "permanent", "expired")},
            }
            for each in found.checkpoints
        ],
        "unfinished": [str(path) for path in found.unfinished],
    }


def _state(each: Listed) -> str:
    if each.found.manifest:
        return "whole"
    return "damaged" if each.found.damaged else "unreadable"


def _retention(found: Listing) -> str:
    if found.policy is None:
        return "retention: unknown, since no checkpoint has a job that can be read"
    policy, expired = found.policy, [each for each in found.checkpoints if "expired" in each.notes]
    told = _policy(policy)
    if not expired:
        return f"retention: {told}; nothing to remove"
    return f"retention: {told}; the next save removes {len(expired)} ({gib(sum(each.bytes for each in expired))})"


def _policy(policy: Retention) -> str:
    if not policy.keep:
        return "keep=0 keeps all"
    every = f", keep_every={policy.keep_every}" if policy.keep_every else ""
    return f"keep={policy.keep}{every}{', keep_best=true' if policy.keep_best else ''}"


def _unfinished(found: Listing) -> list[str]:
    if not found.unfinished:
        return []
    names = ", ".join(path.name for path in found.unfinished)
    return [f"unfinished: {names}; a save goes on, or was interrupted and the next one removes it"]


def manifest(found: Manifest, damage: str, pattern: str, limit: int, boxes: bool) -> str:
    """Returns the text of `show`: facts, sizes by kind, and the tensors that match `pattern`, at most `limit` (0: all)
    of them."""
    age = age_of(found.path)
    when = f", {seconds(age)} ago" if age is not None else ""
    lines = [f"{found.path}: step {found.step}{when}", *_facts(found)]
    if damage:
        lines.append(f"damaged: {damage}")
    size = gib(sum(file.bytes for file in found.files.values()))
    lines += [f"files: {len(found.files)}, {size}", ""]
    kinds = [(kind, str(count), f"{elements:,}", gib(size)) for kind, count, elements, size in _kinds(found)]
    lines += [*aligned([("kind", "tensors", "elements", "size"), *kinds], "lrrr"), ""]
    chosen = matching(found, pattern)
    shown = chosen[: limit or None]
    rows = [("tensor", "type", "shape", "boxes")]
    for name, tensor in shown:
        rows.append((name, tensor.dtype, _shape(tensor.shape), str(len(tensor.boxes))))
        if boxes:
            rows += [(f"  {_indices(box)}", "", "", file) for file, box in tensor.boxes]
    lines += aligned(rows, "llll" if boxes else "lllr")
    if len(shown) < len(chosen):
        lines.append(f"and {len(chosen) - len(shown)} more tensors; --tensors PATTERN or --limit 0 shows them")
    return "\n".join(lines)


def manifest_document(found: Manifest, damage: str, pattern: str) -> dict[str, Any]:
    """Returns the document of `show --json`."""
    return {
        "path": str(found.path),
        "step": found.step,
        "age_s": age_of(found.path),
        "problem": damage or None,
        "meta": found.meta,
        "files": {name: {"bytes": file.bytes, "digest": file.digest} for name, file in found.files.items()},
        "kinds": {
            kind: {"tensors": count, "elements": elements, "bytes": size}
            for kind, count, elements, size in _kinds(found)
        },
        "tensors": {
            name: {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "bytes": tensor.nbytes,
                "boxes": [{"file": file, "offsets": box.offsets, "sizes": box.sizes} for file, box in tensor.boxes],
            }
            for name, tensor in matching(found, pattern)
        },
    }


def _facts(found: Manifest) -> list[str]:
    """Returns lines about the job and the progress of a run, as far as the metadata are there."""
    meta = found.meta
    lines = [f"layout: {layout_of(found)}  precision: {precision_of(found)}"] if "job" in meta else []
    fields = {name: meta[name] for name in ("samples", "updates", "vocab_size") if name in meta}
    if fields:
        lines.append("  ".join(f"{name}: {value}" for name, value in fields.items()))
    if meta.get("val_loss") is not None:
        lines.append(f"val_loss: {meta['val_loss']}  (step {meta.get('val_step')})")
    return lines


def _kinds(found: Manifest) -> list[tuple[str, int, int, int]]:
    """Returns kind, tensors, elements and bytes by kind, and of all together."""
    kinds: dict[str, list[StoredTensor]] = {}
    for name, tensor in found.tensors.items():
        kinds.setdefault(kind_of(name) or "parameters", []).append(tensor)
    every = [*kinds.items(), ("total", list(found.tensors.values()))]
    return [
        (kind, len(tensors), sum(each.elements for each in tensors), sum(each.nbytes for each in tensors))
        for kind, tensors in every
    ]


def matching(found: Manifest, pattern: str) -> list[tuple[str, StoredTensor]]:
    """Returns the tensors whose names match the pattern of --tensors."""
    return [(name, tensor) for name, tensor in found.tensors.items() if fnmatchcase(name, pattern)]


def verified(path: Path, problems: Sequence[str]) -> str:
    """Returns the text of `verify` about one checkpoint."""
    return f"{path}: damaged\n" + "\n".join(f"  {each}" for each in problems) if problems else f"{path}: whole"


def converted(done: Converted) -> str:
    """Returns the text of `convert`."""
    lines = [f"{done.target}: {counted(done.tensors, 'tensor')}, {gib(done.bytes)}"]
    lines += aligned([(f"  {name}", gib(size)) for name, size in done.files.items()], "lr")
    if done.form == "phalanx":
        lines.append(f"  resume:  phalanx train {done.target / 'config.yaml'}")
    return "\n".join(lines)


def converted_document(done: Converted) -> dict[str, Any]:
    """Returns the document of `convert --json`."""
    return {
        "target": str(done.target),
        "form": done.form,
        "step": done.step,
        "tensors": done.tensors,
        "bytes": done.bytes,
        "files": done.files,
        "notes": list(done.notes),
    }


def difference(found: StateDifference, limit: int) -> str:
    """Returns the text of `diff`, with at most `limit` (0: all) tensors and as many fields."""
    equal = f"{counted(found.equal, 'tensor')} bit-equal"
    if found.is_empty:
        return f"equal: {equal}"
    fields = f"; {counted(len(found.fields), 'field')} of the metadata different" if found.fields else ""
    lines = [f"{equal}, {len(found.tensors)} different{fields}"]
    if found.tensors:
        rows = [("tensor", "a", "b", "elements", "max abs", "max rel", "at", "a there", "b there")]
        rows += [_row(each) for each in found.tensors[: limit or None]]
        lines += ["", *aligned(rows, "lllrrrlrr"), *_more(len(found.tensors), limit, "tensors")]
    if found.fields:
        rows = [("field", "a", "b")]
        rows += [(each.name, _short(each.a), _short(each.b)) for each in found.fields[: limit or None]]
        lines += ["", *aligned(rows, "lll"), *_more(len(found.fields), limit, "fields")]
    return "\n".join(lines)


def difference_document(found: StateDifference) -> dict[str, Any]:
    """Returns the document of `diff --json`."""
    return {
        "equal": found.is_empty,
        "tensors_equal": found.equal,
        "tensors": [
            {
                "name": each.name,
                **{
                    side: {"dtype": tensor.dtype, "shape": tensor.shape} if tensor else None
                    for side, tensor in (("a", each.a), ("b", each.b))
                },
                "values": asdict(each.values) if each.values else None,
            }
            for each in found.tensors
        ],
        "fields": [asdict(each) for each in found.fields],
    }


def _row(each: TensorDifference) -> tuple[str, ...]:
    sides = [f"{tensor.dtype} {_shape(tensor.shape)}" if tensor else "missing" for tensor in (each.a, each.b)]
    values = each.values
    if values is None:
        return (each.name, *sides, "", "", "", "", "", "")
    return (
        *(each.name, *sides, f"{values.elements:,}", f"{values.max_abs:.3g}", f"{values.max_rel:.3g}"),
        *(str(list(values.at)), f"{values.a:.7g}", f"{values.b:.7g}"),
    )


def _more(count: int, limit: int, noun: str) -> list[str]:
    return [f"and {count - limit} more {noun}; --limit 0 shows them"] if limit and count > limit else []


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _indices(box: Box) -> str:
    return box.key("", ()) if box.sizes else "[]"
