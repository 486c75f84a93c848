"""The cost of a run in device hours, money, energy and carbon: one formula each, from the tokens per second of a step.

Nothing is guessed: without a price, a power or a carbon intensity the figures that need it are left out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from phalanx.config.cluster import Cluster
from phalanx.config.clusters import CLUSTERS
from phalanx.config.job import Job
from phalanx.partition.ramp import ramp_of
from phalanx.units import figure, seconds

FIGURES = ("price_per_device_hour", "power_w", "carbon_g_per_kwh")
"""The fields of a cluster from which costs follow."""
SECONDS_PER_HOUR = 3600
WATTS_PER_KILOWATT = 1000
GRAMS_PER_KILOGRAM = 1000


@dataclass(frozen=True)
class RunCost:
    """A run of some tokens."""

    tokens: float
    seconds: float
    """Seconds of steps at the predicted speed, without restarts, evaluation or checkpoints."""
    device_hours: float
    """Devices times hours."""
    price: float | None
    """device_hours × cluster.price_per_device_hour, in the currency of that; None without a price."""
    kwh: float | None
    """Energy at the wall in kWh: device_hours × cluster.power_w / 1000; None if the power is not known."""
    co2_kg: float | None
    """kg CO2-equivalent: kwh × cluster.carbon_g_per_kwh / 1000; None if either is not known."""

    def line(self) -> str:
        """Returns the known figures in one line."""
        return f"run of {_amount(self.tokens)} tokens: {', '.join(self._figures())}"

    def _figures(self) -> Iterator[str]:
        yield seconds(self.seconds)
        texts = {
            "{} device hours": self.device_hours,
            "price {}": self.price,
            "{} kWh": self.kwh,
            "{} kg CO2": self.co2_kg,
        }
        yield from (text.format(figure(value)) for text, value in texts.items() if value is not None)

    def as_dict(self) -> dict[str, Any]:
        """Returns the entry `run` of `--json`; null is what is not known."""
        return vars(self).copy()


_UNITS = {"T": 1e12, "B": 1e9, "M": 1e6, "K": 1e3, "": 1.0}
"""Units of tokens, largest first."""


def _amount(tokens: float) -> str:
    """Returns tokens to three digits: "15T", "1.05B"."""
    unit = next((unit for unit, size in _UNITS.items() if tokens >= size), "")
    return f"{tokens / _UNITS[unit]:.3g}{unit}"


def amount(text: str) -> float:
    """Returns the tokens that a text such as "15T", "1.05B" or "15e12" states. Raises ValueError for another text."""
    unit = text[-1:].upper() if text[-1:].isalpha() else ""
    if unit not in _UNITS:
        raise ValueError(f"expected a number of tokens, such as 15T, 300B or 15e12, found {text!r}")
    try:
        tokens = float(text[:-1] if unit else text) * _UNITS[unit]
    except ValueError:
        tokens = math.nan
    if not 0 < tokens < math.inf:
        raise ValueError(f"expected a number of tokens above 0, such as 15T, 300B or 15e12, found {text!r}")
    return tokens


def run_cost(cluster: Cluster, devices: int, tokens: float, tokens_per_s: float) -> RunCost:
    """Returns the cost of `tokens` on `devices` devices that process `tokens_per_s` together."""
    seconds = tokens / tokens_per_s
    hours = devices * seconds / SECONDS_PER_HOUR
    kwh = hours * cluster.power_w / WATTS_PER_KILOWATT if cluster.power_w else None
    carbon = cluster.carbon_g_per_kwh
    return RunCost(
        tokens=tokens,
        seconds=seconds,
        device_hours=hours,
        price=hours * cluster.price_per_device_hour if cluster.price_per_device_hour else None,
        kwh=kwh,
        co2_kg=kwh * carbon / GRAMS_PER_KILOGRAM if kwh is not None and carbon else None,
    )


@dataclass(frozen=True)
class Prices:
    """The figures of a user for the runs of a table's machines."""

    cluster: Cluster
    """What is stated here is that of every row; the rest is that of a row's machine."""
    tokens: float
    """Tokens of every run; 0: no costs."""

    def of(self, machine: Cluster, devices: int, tokens_per_s: float) -> RunCost:
        """Returns the cost of a run on a row's machine."""
        stated = {name: getattr(self.cluster, name) or getattr(machine, name) for name in FIGURES}
        return run_cost(replace(machine, **stated), devices, self.tokens, tokens_per_s)


def tokens_of(job: Job, tokens: float) -> float:
    """Returns the tokens of a run: `tokens`, or with 0 those of its train.steps."""
    return tokens or ramp_of(job).samples(job.train.steps) * job.model.seq_len


def is_asked(cluster: Cluster, tokens: float) -> bool:
    """Returns whether a job asks for the cost of its run: for that of `tokens`, or with a price, power or carbon
    intensity of its own."""
    known = CLUSTERS.get(cluster.preset.partition(":")[0], Cluster())
    return bool(tokens) or any(getattr(cluster, name) != getattr(known, name) for name in FIGURES)
