"""The parts of a config.json: each says which fields of transformers it reads and writes, and which of ours they set.

A term works in both directions, so that what is read and what is written cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from math import isclose, isfinite, log
from typing import Any, Literal, Protocol

from phalanx.config.model import ModelConfig, RopeScaling
from phalanx.nearest import did_you_mean, nearest

REQUIRED: Any = object()
"""The default of a field without which a configuration says nothing."""
LARGEST = 2**31 - 1
"""Largest size that is read."""
MOST_LAYERS, MOST_EXPERTS = 10_000, 65_536
HARMLESS_PREFIX = "unsloth_"
"""Begins fields that Unsloth writes and transformers does not read."""
_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list",
    dict: "an object",
}
_STAND_INS: dict[type, Any] = {int: 1, float: 1.0, bool: False, str: "", list: [], dict: {}}

Fields = dict[str, Any]
"""Values of ModelConfig by dotted path, such as "moe.n_experts"."""


class ConfigReader:
    """The fields of a config.json, which notes those that were read and everything that is wrong."""

    def __init__(self, values: Mapping[str, Any], prefix: str = ""):
        self._values = values
        self.prefix = prefix
        self.seen: set[str] = set()
        self.problems: list[str] = []
        self.notes: list[str] = []

    def take(self, name: str, kind: type, default: Any = REQUIRED, most: int = LARGEST, least: int = 0) -> Any:
        """Returns the value of a field, or its default where it is absent or null. A wrong value becomes a problem, and
        a stand-in is returned."""
        self.seen.add(name)
        value = self._values.get(name)
        stand_in = _STAND_INS[kind] if default is REQUIRED else default
        if value is None:
            if default is True and self.names(name):  # transformers takes it for false
                self.problem(name, "is null, expected true or false")
            if default is REQUIRED:
                self.problem(name, "is missing")
            return stand_in
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            self.problem(name, f"is {shown(value)}, expected {_KINDS[kind]}")
            return stand_in
        if kind is float and not isfinite(value):
            self.problem(name, f"is {value}, expected a finite number")
            return stand_in
        if kind is int and not least <= value <= most:
            self.problem(name, f"is {value:,}, expected at most {most:,} and at least {least}")
            return stand_in
        return value

    def problem(self, name: str, message: str) -> None:
        """Notes what is wrong with a field."""
        self.problems.append(f"{self.prefix}{name} {message}")

    def inside(self, name: str) -> ConfigReader:
        """Returns the reader of an object within this one, which shares problems and notes. Absent, it is empty."""
        inner = ConfigReader(self.take(name, dict, {}), f"{self.prefix}{name}.")
        inner.problems, inner.notes = self.problems, self.notes
        return inner

    def holds(self, name: str) -> bool:
        """Returns whether a field is present and not null."""
        return self._values.get(name) is not None

    def names(self, name: str) -> bool:
        """Returns whether a field is present, be it null."""
        return name in self._values

    def states(self, name: str, value: Any) -> bool:
        """Returns whether a field has this value."""
        return self._values.get(name) == value

    def stated(self) -> list[str]:
        """Returns the fields that are set."""
        return [name for name, value in self._values.items() if value is not None]

    def raw(self, name: str) -> Any:
        """Returns the value of a field of any type, and notes that it was read."""
        self.seen.add(name)
        return self._values.get(name)

    def raw_or(self, name: str, default: Any) -> Any:
        """Returns the same, or its default where it is absent or null; null is not true."""
        value = self.raw(name)
        return default if value is None and not (default is True and self.names(name)) else value

    def left(self) -> list[str]:
        """Returns the fields that are set and that nothing has read."""
        return [name for name, value in self._values.items() if name not in self.seen and value is not None]


class Term(Protocol):
    """A part of a configuration."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        """Sets the fields of ours that this part determines."""

    def write(self, model: ModelConfig) -> Fields:
        """Returns the fields of theirs."""
        ...


class ReadOnly:
    """A part of a kind that is read and not written."""

    def write(self, model: ModelConfig) -> Fields:
        """Raises NotImplementedError: no config.json of such a kind is written."""
        raise NotImplementedError(type(self).__name__)


@dataclass(frozen=True)
class Field:
    """One field of theirs that is one field of ours."""

    theirs: str
    ours: str
    kind: type
    default: Any = REQUIRED
    write_as: str | Callable[[ModelConfig], Any] = ""
    """The value to write, or the path of it, where ours may stand for a default, such as 0 key/value heads."""
    most: int = LARGEST
    least: int = 0
    also: tuple[str, ...] = ()
    """Other names of theirs, which are read only."""
    absent: Any = None
    """The value of a field that is absent where it is another than that of null, which is the default."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        names = (self.theirs, *self.also)
        chosen = next((name for name in names if source.holds(name)), self.theirs)
        default = self.default if self.absent is None or source.names(chosen) else self.absent
        fields[self.ours] = value = source.take(chosen, self.kind, default, self.most, self.least)
        for name in names:
            if source.holds(name) and source.raw(name) != value and name != chosen:
                source.problem(name, f"is {shown(source.raw(name))}, {chosen} is {shown(value)}: they are the same")

    def write(self, model: ModelConfig) -> Fields:
        how = self.write_as or self.ours
        return {self.theirs: value_of(model, how) if isinstance(how, str) else how(model)}


@dataclass(frozen=True)
class Fixed:
    """A field that must have one of a few values, since ours computes nothing else. The first is written."""

    theirs: str
    values: tuple[Any, ...]
    default: Any
    """The value that transformers takes if the field is absent."""
    reason: str = ""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        value = source.raw_or(self.theirs, self.default)
        if not any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in self.values):
            known = " or ".join(shown(each) for each in self.values)
            source.problem(self.theirs, f"is {shown(value)}, supported: {known}{self.reason and f' ({self.reason})'}")

    def write(self, model: ModelConfig) -> Fields:
        return {self.theirs: self.values[0]}


@dataclass(frozen=True)
class Written:
    """A field that is read without effect, and written with one value."""

    theirs: str
    value: Any

    def read(self, source: ConfigReader, fields: Fields) -> None:
        source.seen.add(self.theirs)

    def write(self, model: ModelConfig) -> Fields:
        return {self.theirs: self.value}


@dataclass(frozen=True)
class Choice:
    """A field whose values are those of one field of ours by another name. The first name of a value is written."""

    theirs: str
    ours: str
    names: tuple[tuple[Any, Any], ...]
    """(theirs, ours)"""
    default: Any = None
    """The value that transformers takes if the field is absent; None: ours keeps the family's own value."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        value = source.raw_or(self.theirs, self.default)
        for theirs, ours in self.names:
            if value == theirs and isinstance(value, bool) == isinstance(theirs, bool):
                fields[self.ours] = ours
                return
        if value is not None or self.default is not None:
            known = ", ".join(shown(theirs) for theirs, _ in self.names)
            source.problem(self.theirs, f"is {shown(value)}, supported: {known}")

    def write(self, model: ModelConfig) -> Fields:
        ours = value_of(model, self.ours)
        known = [theirs for theirs, value in self.names if value == ours]
        return {self.theirs: known[0]} if known else {}


def value_of(model: ModelConfig, path: str) -> Any:
    """Returns the value at a dotted path."""
    part: Any = model
    for name in path.split("."):
        part = getattr(part, name)
    return part


def shown(value: Any) -> str:
    """Returns a value as JSON shows it, at most 60 characters of it."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def written(terms: Iterable[Term], model: ModelConfig) -> Fields:
    """Returns the fields of all terms in their order."""
    return {name: value for term in terms for name, value in term.write(model).items()}


def refuse_unknown(source: ConfigReader, harmless: Collection[str] = (), where: str = "") -> None:
    """Notes every field that nothing has read and that is not known to change nothing; `where` says of what. The first
    message says how to read the file without them. Programs write these files, so that few names are slips of the
    pen."""
    unknown = [name for name in source.left() if name not in harmless and not name.startswith(HARMLESS_PREFIX)]
    listed = ",".join(f"{source.prefix}{name}" for name in unknown)
    for name in unknown:
        meant = nearest(name, [*source.seen, *harmless], strictly=True)
        hint = f"; did you mean {meant}?" if meant else ""
        way = f" (what changes no number may be left out: model.ignore_config=[{listed}])" if name == unknown[0] else ""
        source.problem(name, f"is not understood{where}{hint}{way}")


_ROPE_KINDS = ("default", "linear", "llama3", "yarn")
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Rope:
    """Base, stretching and share of rotary positions."""

    theta: float = 10000.0
    """The base if the configuration names none."""
    fraction: float = 1.0
    """The share of a head if the configuration names none."""
    theta_name: str = "rope_theta"
    fraction_name: str = "partial_rotary_factor"
    """Older names of the two."""
    partial: Literal["used", "ignored", "refused"] = "ignored"
    """What transformers does with a share of a head below 1: kinds that ignore it turn whole heads, and fail if
    positions are stretched, too."""
    latent: bool = False
    """Latent attention: mscale_all_dim enlarges the scores."""
    stretched: RopeScaling | None = None
    """The stretching if the configuration names none."""
    harmless: Collection[str] = ()
    """Fields of rope parameters without effect on text."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        theta = source.take(self.theta_name, float, self.theta)
        fraction = source.take(self.fraction_name, float, self.fraction)
        for own, usual, value in (
            (self.theta_name, "rope_theta", theta),
            (self.fraction_name, "partial_rotary_factor", fraction),
        ):
            if source.holds(usual) and source.raw(usual) != value:
                source.problem(usual, f"is {shown(source.raw(usual))}, {own}, which transformers reads, is {value:g}")
        named = source.holds("rope_parameters") or bool(source.raw("rope_scaling"))
        rope = source.inside("rope_parameters")
        if not source.holds("rope_parameters"):
            rope = source.inside("rope_scaling")
        else:
            _refuse_second(source, rope)
        fields["rope_theta"] = rope.take("rope_theta", float, theta)
        given = source.holds(self.theta_name) or source.holds("rope_theta")
        if given and fields["rope_theta"] != theta:
            source.problem("rope_theta", f"is {theta:g}, {rope.prefix}rope_theta is {fields['rope_theta']:g}")
        fraction = rope.take("partial_rotary_factor", float, fraction)
        if not named and self.stretched:
            fields["rope_scaling"] = self.stretched
            if theta != self.theta:
                source.problem("rope_theta", f"is {theta:g}, which transformers reads in rope_parameters alone")
        else:
            fields["rope_scaling"] = scaling(rope, fields["seq_len"])
        fields["rotary_fraction"] = self._share(
            rope if rope.holds("partial_rotary_factor") else source, fraction, fields["rope_scaling"]
        )
        if not named and self.stretched:
            return
        if self.latent and (growth := _growth_of_scores(rope, fields["rope_scaling"])) != 1:
            fields["attention_scale"] = (
                growth / max(1, fields["mla.nope_head_dim"] + fields["mla.rope_head_dim"]) ** 0.5
            )
        refuse_unknown(rope, self.harmless)

    def _share(self, source: ConfigReader, fraction: float, stretched: RopeScaling) -> float:
        """Returns the share of a head that transformers turns."""
        if self.partial == "used" or fraction == 1:
            return fraction
        if self.partial == "refused" or stretched != RopeScaling():
            source.problem(
                "partial_rotary_factor",
                f"is {fraction:g}, with which transformers computes no {stretched.kind} positions of this kind",
            )
        source.notes.append(
            f"partial_rotary_factor {fraction:g} is ignored, as by transformers: whole heads are turned"
        )
        return 1.0

    def write(self, model: ModelConfig) -> Fields:
        values = rope_values(model, partial=self.partial == "used")
        stretched = model.rope_scaling
        if self.latent and stretched.kind == "yarn" and stretched.factor > 1 and model.attention_scale:
            # (0.1 m ln factor + 1)² is what multiplies the scores; mscale gives rotated parts the size they have.
            growth = (model.attention_scale * model.head_size**0.5) ** 0.5
            all_dim = (growth - 1) / (0.1 * log(stretched.factor))
            size = stretched.magnitude or 0.1 * log(stretched.factor) + 1
            values |= {"mscale": (size * growth - 1) / (0.1 * log(stretched.factor)), "mscale_all_dim": all_dim}
            values.pop("attention_factor", None)
        return {"rope_parameters": values}


@dataclass(frozen=True)
class LongRope(Rope):
    """Phi-3: positions are plain, or each pair is stretched by itself: one way up to the original length, which the
    model has then, and another beyond."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        original = source.take("original_max_position_embeddings", int, 4096, least=2)
        rope = source.inside("rope_scaling" if source.holds("rope_scaling") else "rope_parameters")
        kind = rope.take("rope_type", str, rope.take("type", str, "default"))
        if kind == "default":
            super().read(source, fields)
            return
        if kind not in ("longrope", "su", "yarn"):  # the last two are older names
            rope.problem("rope_type", f"is {shown(kind)}, supported for this kind: default, longrope")
            rope.seen |= set(rope.left())
            return
        source.seen |= {"rope_scaling", "rope_parameters"}
        if source.holds("rope_scaling") and source.holds("rope_parameters"):
            _refuse_second(source, source.inside("rope_parameters"))
        if (inner := rope.take("original_max_position_embeddings", int, original, least=2)) != original:
            rope.problem(
                "original_max_position_embeddings",
                f"is {inner:,}, and transformers takes the one beside rope_scaling, {original:,}",
            )
        factor = rope.take("factor", float, fields["seq_len"] / original)
        short, long = (rope.take(f"{name}_factor", list) for name in ("short", "long"))
        if factor <= 1 or not all(map(_is_number, (*short, *long))):
            rope.problem("short_factor", f"is for a factor above 1, which is {factor:g}, and holds numbers")
            return
        own = rope.take("attention_factor", float, 0.0)
        usual = isclose(own, (1 + log(factor) / log(original)) ** 0.5)
        fields["rope_scaling"] = RopeScaling(
            *("longrope", factor),
            original_seq_len=original,
            magnitude=0.0 if usual else own,
            short=tuple(map(float, short)),
            long=tuple(map(float, long)),
        )
        fields["rope_theta"] = rope.take("rope_theta", float, source.take("rope_theta", float, self.theta))
        share = rope.take("partial_rotary_factor", float, source.take("partial_rotary_factor", float, 1.0))
        fields["rotary_fraction"] = share
        if fields["seq_len"] > original:
            fields["seq_len"] = original
            source.notes.append(
                f"positions are those for at most {original:,} tokens: a larger model.seq_len takes the others"
            )
        refuse_unknown(rope)

    def write(self, model: ModelConfig) -> Fields:
        stretched = model.rope_scaling
        known = stretched.kind == "longrope" and stretched.factor > 1
        more = {"original_max_position_embeddings": stretched.original_seq_len} if known else {}
        return super().write(model if known else replace(model, rope_scaling=RopeScaling())) | more


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and value > 0


@dataclass(frozen=True)
class RopeWithWindows:
    """Gemma 3, OLMo 3: layers with a window are not stretched, and may have a base of their own."""

    theta: float = 1e6
    window_theta: float = 10000.0
    one_base: bool = False
    """A base that the configuration names is that of all layers (OLMo 3)."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        theta = source.take("rope_theta", float, self.theta)
        local = theta if self.one_base else source.take("rope_local_base_freq", float, self.window_theta)
        parameters = source.inside("rope_parameters")
        full, window = parameters.inside(FULL), parameters.inside(SLIDING)
        if self.one_base and not parameters.holds(FULL) and parameters.left():
            full, local = parameters, parameters.take("rope_theta", float, theta)
        elif source.holds("rope_parameters"):
            _refuse_second(source, full)
        else:
            full = source.inside("rope_scaling")
            if full.holds("type") and not full.holds("rope_type"):
                full.problem("type", "is read as rope_type by some releases of transformers and ignored by others")
        fields["rope_theta"] = full.take("rope_theta", float, theta)
        base = window.take("rope_theta", float, local)
        if self.one_base and fields["window"] and base != self.window_theta and not window.holds("rope_theta"):
            source.problem(
                "rope_theta",
                f"is {base:g}, which layers with a window have in some releases of transformers only: state "
                f"rope_parameters.{SLIDING}.rope_theta",
            )
        fields["window_rope_theta"] = base if fields["window"] else 0.0
        fields["rope_scaling"] = scaling(full, fields["seq_len"])
        if scaling(window, fields["seq_len"]).factor > 1:
            window.problem("factor", "stretches layers with a window, which keep their positions here")
        for part in (parameters, full, window):
            refuse_unknown(part)

    def write(self, model: ModelConfig) -> Fields:
        window = {"rope_theta": model.window_rope_theta or model.rope_theta, "rope_type": "default"}
        return {"rope_parameters": {FULL: rope_values(model), SLIDING: window}}


def _refuse_second(source: ConfigReader, rope: ConfigReader) -> None:
    """Notes a rope_scaling, the older spelling, that contradicts `rope`, the newer one: releases of transformers differ
    in which of the two they take."""
    old, spelled = source.raw("rope_scaling"), {"type": "rope_type"}
    if not old:
        return
    if isinstance(old, dict):
        old = {"rope_theta": source.raw("rope_theta")} | {spelled.get(name, name): each for name, each in old.items()}
    if not isinstance(old, dict) or any(not rope.states(name, old.get(name)) for name in {*old, *rope.stated()}):
        source.problem("rope_scaling", "contradicts rope_parameters: keep the one that the weights were trained with")


def scaling(rope: ConfigReader, context: int) -> RopeScaling:
    """Returns the stretching of an object of rope parameters; `context` is the released one in tokens."""
    old = rope.take("type", str, "default")
    kind = rope.take("rope_type", str, old)
    if rope.holds("type") and old != kind:
        rope.problem("type", f"is {shown(old)}, rope_type is {shown(kind)}: they are the same")
    if kind not in _ROPE_KINDS:
        rope.problem(
            "rope_type", f"is {shown(kind)}{did_you_mean(kind, _ROPE_KINDS)} (supported: {', '.join(_ROPE_KINDS)})"
        )
        rope.seen |= set(rope.left())
        return RopeScaling()
    if kind == "default":
        if not rope.holds("type") and not rope.holds("rope_type") and rope.take("factor", float, 1.0) != 1:
            rope.problem("factor", f"is {rope.raw('factor'):g}, and no rope_type says how it stretches")
        # What other kinds need is without effect.
        rope.seen |= {"factor", "original_max_position_embeddings"}
        return RopeScaling()
    values: dict[str, Any] = {"kind": kind, "factor": rope.take("factor", float)}
    if values["factor"] < 1:
        rope.problem("factor", f"is {values['factor']:g}, expected at least 1")
        values["factor"] = 1.0
    if kind == "linear":
        rope.seen.add("original_max_position_embeddings")
        return RopeScaling(**values)
    values["original_seq_len"] = max(1, rope.take("original_max_position_embeddings", int, context))
    if kind == "llama3":
        values["low_freq_factor"] = rope.take("low_freq_factor", float)
        values["high_freq_factor"] = rope.take("high_freq_factor", float)
        return RopeScaling(**values)
    values["beta_fast"] = rope.take("beta_fast", float, 32.0) or 32.0
    values["beta_slow"] = rope.take("beta_slow", float, 1.0) or 1.0
    values["truncate"] = rope.take("truncate", bool, True)
    values["magnitude"] = _magnitude(rope, values["factor"])
    if values["factor"] == 1 and values["magnitude"]:
        rope.problem("attention_factor", f"is {values['magnitude']:g}, supported where factor is 1: 1")
    return RopeScaling(**values)


def rope_values(model: ModelConfig, *, partial: bool = False) -> Fields:
    """Returns the rope parameters of layers without a window of their own, with the share of a head that turns if
    `partial`: most kinds of transformers turn whole heads, whatever partial_rotary_factor says."""
    stretched, values = model.rope_scaling, {"rope_theta": model.rope_theta, "rope_type": "default"}
    if partial:
        values["partial_rotary_factor"] = model.rotary_fraction
    if stretched.factor == 1:
        return values
    values |= {"rope_type": stretched.kind, "factor": stretched.factor}
    if stretched.kind == "linear":
        return values
    if stretched.kind == "llama3":
        values |= {"low_freq_factor": stretched.low_freq_factor, "high_freq_factor": stretched.high_freq_factor}
    if stretched.kind == "longrope":
        values |= {"short_factor": list(stretched.short), "long_factor": list(stretched.long)}
    elif stretched.kind == "yarn":
        values |= {"beta_fast": stretched.beta_fast, "beta_slow": stretched.beta_slow, "truncate": stretched.truncate}
    if stretched.magnitude and stretched.kind in ("yarn", "longrope"):
        values["attention_factor"] = stretched.magnitude
    return values | {"original_max_position_embeddings": stretched.original_seq_len}


def _magnitude(rope: ConfigReader, factor: float) -> float:
    """Returns the factor of rotated queries and keys (Peng et al. 2023, section 3.4); 0 for the usual one."""
    own = rope.take("attention_factor", float, 0.0)
    mscale, all_dim = rope.take("mscale", float, 0.0), rope.take("mscale_all_dim", float, 0.0)
    if not own and mscale and all_dim:
        own = _grown(factor, mscale) / _grown(factor, all_dim)
    return 0.0 if isclose(own, _grown(factor, 1.0)) else own


def _grown(factor: float, mscale: float) -> float:
    return 0.1 * mscale * log(factor) + 1


def _growth_of_scores(rope: ConfigReader, stretched: RopeScaling) -> float:
    """Returns what multiplies the scores beside 1 / √head_size (DeepSeek-V3's release, inference/model.py)."""
    if stretched.kind != "yarn":
        return 1.0
    return _grown(stretched.factor, rope.take("mscale_all_dim", float, 0.0)) ** 2


@dataclass(frozen=True)
class Windows:
    """Sliding windows, and which layers attend to all keys."""

    default: int = 0
    """The window if the configuration names none."""
    full_every: int = 0
    """Every n-th layer has no window unless the configuration lists the layers; 0: all have one."""
    switch: str = ""
    """A field without which sliding_window has no effect: use_sliding_window."""
    layers: bool = True
    """Writes layer_types, which transformers reads in this kind."""
    pattern: bool = False
    """transformers reads sliding_window_pattern where there are no layer_types."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        window = source.take("sliding_window", int, 0 if source.names("sliding_window") else self.default)
        pattern = source.take("sliding_window_pattern", int, self.full_every)
        wrong = pattern != self.full_every and not self.pattern
        first = source.take("max_window_layers", int, 28 if self.switch and self.layers else 0)
        if self.switch and not source.take(self.switch, bool, False):
            window = 0
        elif window == 0 and source.holds("sliding_window"):
            source.problem("sliding_window", "is 0, supported: null, or at least 1")
        if window and self.switch and first and not source.holds("layer_types"):
            if not self.layers or first < fields["n_layers"]:
                source.problem("max_window_layers", f"is {first}, supported: layer_types, or 0")
            window = 0  # the first layers have none
        kinds = source.take("layer_types", list, [])
        if wrong and window and not kinds:
            source.problem(
                "sliding_window_pattern",
                f"is {pattern}, which transformers does not read in this kind; supported: layer_types",
            )
        fields["window"], fields["full_every"] = window, pattern if window else 0
        if not kinds:
            return
        if len(kinds) != fields["n_layers"]:
            source.problem("layer_types", f"lists {len(kinds):,} layers, num_hidden_layers is {fields['n_layers']:,}")
            return
        if unknown := [kind for kind in kinds if kind not in (FULL, SLIDING)]:
            source.problem("layer_types", f"holds {shown(unknown[0])}, supported: {FULL}, {SLIDING}")
        elif fields["window"] and not self.layers and {*kinds} != {SLIDING}:
            text = f"holds {FULL}, and transformers gives every layer of this kind the sliding_window: programs differ"
            source.problem("layer_types", f"{text}; supported: {SLIDING} for every layer, or no sliding_window")
        elif SLIDING not in kinds:
            fields["window"] = fields["full_every"] = 0
        elif not fields["window"]:
            source.problem("sliding_window", f"is missing, and layer_types has {SLIDING}")
        else:
            set_windows(fields, [kind == SLIDING for kind in kinds], fields["full_every"])

    def write(self, model: ModelConfig) -> Fields:
        values: Fields = {"sliding_window": model.window or None}
        if self.switch:
            values[self.switch] = model.window > 0
        if self.layers:
            values["layer_types"] = layer_types(model)
        return values


def set_windows(fields: Fields, windowed: list[bool], usual: int) -> None:
    """Sets which layers have a window: every n-th has none, or a pattern. A model that is shorter than its first full
    layer is as well one of the `usual` number."""
    fields["full_every"], pattern = window_rule(windowed)
    if not any(windowed):
        fields["window"] = 0
    elif all(windowed):
        fields["full_every"] = usual if usual > len(windowed) else 0
    elif pattern:
        fields["window_pattern"] = pattern


def window_rule(windowed: list[bool]) -> tuple[int, str]:
    """Returns the number n of which every n-th layer has no window, 0 for none, or the pattern of the layers."""
    every = windowed.index(False) + 1 if any(windowed) and False in windowed else 0
    if not any(windowed) or windowed == [not every or (layer + 1) % every != 0 for layer in range(len(windowed))]:
        return every, ""
    return 0, ",".join(shortest(["window" if has else "full" for has in windowed]))


def shortest(kinds: list[str]) -> list[str]:
    """Returns the shortest beginning of a list that repeats to make it."""
    lengths = (n for n in range(1, len(kinds)) if kinds == (kinds[:n] * (len(kinds) // n + 1))[: len(kinds)])
    return kinds[: next(lengths, len(kinds))]


def layer_types(model: ModelConfig) -> list[str]:
    """Returns the kind of attention of every layer."""
    return [(FULL, SLIDING)[model.window_of(layer) > 0] for layer in range(model.n_layers)]


@dataclass(frozen=True)
class Context:
    """The released context, which is the length of a sample unless a job says otherwise. Stretched positions reach
    further than samples may be long."""

    theirs: str = "max_position_embeddings"
    default: int = 2048
    exact: bool = False
    """Learned positions: as many as the context has tokens."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        fields["seq_len"] = max(1, source.take(self.theirs, int, self.default))

    def write(self, model: ModelConfig) -> Fields:
        stretched = model.rope_scaling
        reached = int(stretched.original_seq_len * stretched.factor) if stretched.factor > 1 else 0
        if self.exact or stretched.kind == "linear":
            reached = 0
        return {self.theirs: max(model.seq_len, reached)}


@dataclass(frozen=True)
class PlainHeads:
    """Heads that share the width."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        size, width = source.take("head_dim", int, 0) * fields["n_heads"], fields["d_model"]
        if size and size != width:
            source.problem("head_dim", f"× num_attention_heads is {size:,}, supported: hidden_size {width:,}")

    def write(self, model: ModelConfig) -> Fields:
        return {}


@dataclass(frozen=True)
class AttentionMultiplier:
    """Granite: what multiplies the scores, 1 if the configuration names nothing."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        head = fields["head_dim"] or fields["d_model"] // max(1, fields["n_heads"])
        scale = source.take("attention_multiplier", float, 1.0)
        if not scale:
            source.problem("attention_multiplier", "is 0, expected more")
        fields["attention_scale"] = 0.0 if scale == max(1, head) ** -0.5 else scale

    def write(self, model: ModelConfig) -> Fields:
        return {"attention_multiplier": model.attention_scale or model.head_size**-0.5}


@dataclass(frozen=True)
class NoRope:
    """SmolLM3: the layers without rotary positions."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        every = source.take("no_rope_layer_interval", int, 4)
        turns = source.take("no_rope_layers", list, [])[: fields["n_layers"]]
        if turns:
            # A model that is shorter than the interval has it all the same.
            every = turns.index(0) + 1 if 0 in turns else every * (every > len(turns))
            if turns != _turns(every, fields["n_layers"]):
                source.problem("no_rope_layers", "is not 0 in every n-th of the num_hidden_layers alone")
        fields["nope_every"] = every

    def write(self, model: ModelConfig) -> Fields:
        turns = _turns(model.nope_every, model.n_layers)
        return {"no_rope_layers": turns, "no_rope_layer_interval": model.nope_every or model.n_layers + 1}


@dataclass(frozen=True)
class RotaryDim:
    """MiniMax-M2: the share of a head that positions turn, as a number of elements; rope parameters come first."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        size = source.take("rotary_dim", int, 0)
        if size and fields["rotary_fraction"] == 1:
            fields["rotary_fraction"] = size / (fields["head_dim"] or fields["d_model"] // max(1, fields["n_heads"]))

    def write(self, model: ModelConfig) -> Fields:
        return {}


@dataclass(frozen=True)
class AllEqual:
    """A list with one of a few values for every layer, since ours computes nothing else."""

    theirs: str
    values: tuple[Any, ...]
    reason: str
    required: bool = False
    """Without the list, layers are of another kind: it is written, too."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        for layer, value in enumerate(source.take(self.theirs, list, REQUIRED if self.required else [])):
            if value not in self.values:
                known = " or ".join(map(shown, self.values))
                source.problem(self.theirs, f"has {shown(value)} for layer {layer}, supported: {known} ({self.reason})")
                return

    def write(self, model: ModelConfig) -> Fields:
        return {self.theirs: [self.values[0]] * model.n_layers} if self.required else {}


def _turns(nope_every: int, layers: int) -> list[int]:
    return [int(not nope_every or (layer + 1) % nope_every != 0) for layer in range(layers)]
