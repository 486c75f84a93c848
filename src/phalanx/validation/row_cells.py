"""The cells of a table's row: text, numbers and booleans, with all problems collected."""

from __future__ import annotations

import re
from collections.abc import Mapping

from phalanx.check.model import BOUNDS

COLUMNS = (
    *("source", "row_id", "model_name", "n_params_b", "n_layers", "hidden", "ffn_hidden", "n_heads", "n_kv_heads"),
    *("vocab", "seq_len", "moe_experts", "moe_topk", "gpu", "n_gpus", "gpus_per_node", "dp", "tp", "pp", "vpp", "cp"),
    *("ep", "zero_stage", "sequence_parallel", "recompute", "schedule", "micro_batch", "global_batch_seqs"),
    *("precision", "tflops_per_gpu", "mfu_pct", "tokens_per_s_per_gpu", "step_time_s", "peak_mem_gb", "notes"),
)
"""Columns with a meaning; a table may have any subset of them, and others."""

COUNTS = {
    "n_layers": "model.n_layers",
    "hidden": "model.d_model",
    "ffn_hidden": "model.d_ff",
    "n_heads": "model.n_heads",
    "n_kv_heads": "model.n_kv_heads",
    "vocab": "model.vocab_size",
    "seq_len": "model.seq_len",
    "moe_experts": "model.moe.n_experts",
    "moe_topk": "model.moe.top_k",
    "n_gpus": "cluster.nodes",
    "gpus_per_node": "cluster.devices_per_node",
    "dp": "layout.dp_shard",
    "tp": "layout.tp",
    "pp": "layout.pp",
    "cp": "layout.cp",
    "ep": "layout.ep",
    "micro_batch": "layout.micro_batch",
    "global_batch_seqs": "train.global_batch",
}
"""Columns of whole numbers, and the field of a job whose upper bound each has."""
AMOUNTS = ("n_params_b", "tflops_per_gpu", "mfu_pct", "tokens_per_s_per_gpu", "step_time_s", "peak_mem_gb")

LONGEST = 2000
"""Most characters of a cell with a meaning; the longest of the published tables has 589."""

_BLANK = {"", "-", "--", "n/a", "na", "nan", "none", "null", "?", "x", "unknown", "tbd"}
_YES, _NO = {"yes", "true", "1", "on", "y"}, {"no", "false", "0", "off", "n"}


class Cells:
    """The cells of a row. Reading an invalid cell adds to `problems` and returns nothing."""

    def __init__(self, row: Mapping[str, str]):
        known = {name.strip().lower(): (value or "").strip() for name, value in row.items() if name}
        self._row = {name: known[name][:LONGEST] for name in COLUMNS if name in known}
        self.problems: list[str] = [
            f"{name}: {len(known[name]):,} characters; at most {LONGEST:,}"
            for name in self._row
            if len(known[name]) > LONGEST
        ]
        self.assumed: list[str] = []
        self.description = " ".join(self.text(name) for name in ("source", "row_id", "model_name", "notes")).lower()
        """All that says where the row is from, in small letters."""

    def text(self, name: str) -> str:
        """Returns the cell's text; empty for a blank or unknown value."""
        text = self._row.get(name, "")
        return "" if text.lower() in _BLANK else text

    def raw(self, name: str) -> str:
        """Returns the cell's text in lower case, also where `none` has a meaning."""
        return self._row.get(name, "").lower()

    def number(self, name: str) -> float | None:
        """Returns a positive number, or None."""
        text = self.text(name)
        if not text or text.upper().startswith("OOM"):
            return None
        plain = (
            re.sub(r" *\(.*\)$", "", re.sub(r"(?<=[0-9])[,_](?=[0-9]{3})", "", text)).lstrip("~≈<>≥≤ ").rstrip("%sxBG ")
        )
        try:
            value = float(plain)
        except ValueError:
            value = float("nan")
        if not 0 < value < float("inf"):
            self.problem(f"{name}: expected a number above 0, found {text!r}")
            return None
        return value

    def whole(self, name: str, default: int = 0) -> int:
        """Returns a whole number of at least 1, or `default` for a blank cell."""
        if self.text(name) == "0":
            return default
        value = self.number(name)
        if value is None:
            return default
        if value != int(value):
            self.problem(f"{name}: expected a whole number, found {self.text(name)!r}; nearest: {max(1, round(value))}")
            return default
        return int(value)

    def check(self) -> None:
        """Reads every number, so that all problems with them are reported at once."""
        for name, path in COUNTS.items():
            most, reason = BOUNDS[path]
            if self.whole(name) > most:
                self.problem(f"{name}: must be at most {most:,}, is {self.whole(name):,}: {reason}")
        for name in AMOUNTS:
            self.number(name)

    def yes(self, name: str) -> bool | None:
        """Returns yes, no, or None for a blank cell."""
        text = self.text(name).lower()
        if text and text not in _YES | _NO:
            self.problem(f"{name}: expected yes or no, found {text!r}")
        return True if text in _YES else False if text in _NO else None

    def problem(self, message: str) -> None:
        """Records why the row cannot be expressed."""
        if message not in self.problems:
            self.problems.append(message)

    def assume(self, message: str) -> None:
        """Records a value that was filled in."""
        if message not in self.assumed:
            self.assumed.append(message)
