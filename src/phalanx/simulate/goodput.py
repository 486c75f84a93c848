"""The productive share of a job's time if devices fail, and the optimal time between checkpoints.

Failures are a Poisson process of rate lam for all devices together. A job trains tau seconds, stands still for a
checkpoint of delta seconds, and begins again; a failure, also during a checkpoint, discards all since the last one. A
restart of R seconds (notice, replace, load, warm up) follows, which may itself fail and then begins anew.

With s = tau + delta an attempt succeeds with probability exp(-lam s). The expected time E between two checkpoints is
s after a success, and t + E_R + E after a failure at t:

    E = s exp(-lam s) + integral from 0 to s of lam exp(-lam t) (t + E_R + E) dt
    E_R = (exp(lam R) - 1) / lam                          the same with s = R, and nothing but the restart to repeat
    E = exp(lam R) (exp(lam s) - 1) / lam

which is the complete model of Daly 2006 (A higher order estimate of the optimum checkpoint interval for restart dumps)
for one segment. Of E, tau is productive and delta saves. exp(lam s) - 1 attempts fail on average, so restarts take
(exp(lam s) - 1) E_R, and rework takes the rest, (exp(lam s) - 1) / lam - s. Hence, as shares of the whole time,

    fraction = exp(-lam R)  *  tau / s  *  lam s / (exp(lam s) - 1)
               restarting      saving      rework
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.errors import JobError
from phalanx.units import seconds

SECONDS_PER_DAY = 86400.0
LLAMA_3_RATE = 419 / 54 / 16384
"""Unexpected interruptions per device and day: Llama 3 team 2024 (The Llama 3 herd of models), section 3.3.4 and table
5, 419 in 54 days on 16,384 H100."""


@dataclass(frozen=True)
class Goodput:
    """The shares of a job's time: the productive one and the three lost ones, which sum to one."""

    devices: int
    checkpoint_s: float
    restart_s: float
    mtbf_s: float
    """Mean time between failures of any device; infinite without failures."""
    interval_s: float
    """Training time between two checkpoints; infinite if it is best never to save."""
    fraction: float
    """Productive share: steps whose result is kept."""
    saving: float
    rework: float
    """Training and saving that a failure discarded."""
    restarting: float

    @property
    def interruptions_per_day(self) -> float:
        return SECONDS_PER_DAY / self.mtbf_s


def at(
    interval_s: float, devices: int, failures_per_device_day: float, checkpoint_s: float, restart_s: float
) -> Goodput:
    """Returns the expected shares of time with a checkpoint after every `interval_s` seconds of training. Raises
    JobError for impossible figures."""
    rate = _rate(devices, failures_per_device_day, checkpoint_s, restart_s)
    if not 0 < interval_s < math.inf:
        raise JobError(f"the time between checkpoints is {interval_s:g} s: it has to be more than 0 and finite")
    segment = interval_s + checkpoint_s
    running = math.exp(-rate * restart_s)
    # u / (exp(u) - 1) in a form that does not overflow if almost no attempt succeeds.
    u = rate * segment
    kept_share = u * math.exp(-u) / -math.expm1(-u) if u else 1.0
    return Goodput(
        devices,
        checkpoint_s,
        restart_s,
        mtbf_s=1 / rate if rate else math.inf,
        interval_s=interval_s,
        fraction=running * kept_share * interval_s / segment,
        saving=running * kept_share * checkpoint_s / segment,
        rework=running * (1 - kept_share),
        restarting=1 - running,
    )


def best(
    devices: int, failures_per_device_day: float, checkpoint_s: float, restart_s: float, step_s: float = 0.0
) -> Goodput:
    """Returns the shares of time at the optimal interval, in whole steps of `step_s` seconds if that is given. The
    interval is infinite if nothing fails, and zero if checkpoints are free and steps take no time. Raises JobError for
    impossible figures."""
    rate = _rate(devices, failures_per_device_day, checkpoint_s, restart_s)
    if not 0 <= step_s < math.inf:
        raise JobError(f"a step takes {step_s:g} s: it has to be 0 (not given) or more, and finite")
    if rate == 0:
        return Goodput(devices, checkpoint_s, restart_s, math.inf, math.inf, 1.0, 0.0, 0.0, 0.0)
    exact = exact_interval(checkpoint_s, 1 / rate)
    if step_s == 0 and exact == 0:
        running = math.exp(-rate * restart_s)
        return Goodput(devices, checkpoint_s, restart_s, 1 / rate, 0.0, running, 0.0, 0.0, 1 - running)
    # The fraction has one maximum, so the best number of steps is next to it.
    below = max(1, math.floor(exact / step_s)) if step_s else 0
    choices = [step_s * below, step_s * (below + 1)] if step_s else [exact]
    found = [at(interval, devices, failures_per_device_day, checkpoint_s, restart_s) for interval in choices]
    return max(found, key=lambda goodput: goodput.fraction)


def exact_interval(checkpoint_s: float, mtbf_s: float) -> float:
    """Returns the interval tau that maximises the productive share: the solution of 1 - tau = exp(-tau - delta), in
    units of the mean time between failures. Restarts do not affect it."""
    delta = checkpoint_s / mtbf_s
    # f(tau) = 1 - tau - exp(-tau - delta) is concave and falls from above zero; Young's interval and 1 are not below
    # its zero, so that Newton's steps come down to it without ever passing it.
    tau = min(1.0, math.sqrt(2 * delta))
    while tau > 0:
        value = -tau - math.expm1(-tau - delta)
        after = tau - value / math.expm1(-tau - delta)
        if not after < tau * (1 - 1e-15):
            break
        tau = after
    return tau * mtbf_s


def text(goodput: Goodput) -> str:
    """Formats the figures for a terminal."""
    g = goodput
    who = f"failures of {g.devices:,} devices"
    if math.isinf(g.mtbf_s):
        return "no failures: no checkpoints needed, productive time 100%"
    lost = {"saving": g.saving, "rework": g.rework, "restarting": g.restarting}
    return "\n".join(
        [
            f"{who:<28} {g.interruptions_per_day:.3g} per day, one every {seconds(g.mtbf_s)}",
            f"{'checkpoint interval':<28} {seconds(g.interval_s)}, each checkpoint {seconds(g.checkpoint_s)}",
            f"{'productive time':<28} {g.fraction:.1%}",
            f"{'lost to':<28} {', '.join(f'{name} {share:.2%}' for name, share in lost.items())}",
        ]
    )


def _rate(devices: int, failures_per_device_day: float, checkpoint_s: float, restart_s: float) -> float:
    """Returns the failures per second of all devices. Raises JobError with every figure that is impossible."""
    figures = {
        "failures per device and day": failures_per_device_day,
        "seconds of a checkpoint": checkpoint_s,
        "seconds of a restart": restart_s,
    }
    problems = [] if devices >= 1 else [f"devices: {devices}, where at least 1 is needed"]
    problems += [f"{n}: {v:g}, where 0 or more is needed" for n, v in figures.items() if not 0 <= v < math.inf]
    if problems:
        raise JobError(problems)
    rate = devices * failures_per_device_day / SECONDS_PER_DAY
    return rate if rate > 1e-300 else 0.0  # of less no computer has the inverse
