"""Productive time under failures by cause: each with its own rate, time until it is noticed, and time until the job has
healthy machines again; hot spares; and what each remedy would bring.

A failure of cause i comes with the rate lam_i and starts a restart of R_i seconds: noticing, a machine in place of the
failed one if no spare is free, and starting the ranks. With lam the sum of all rates, the model of
`phalanx.simulate.goodput` holds with exp(-lam R) replaced by its mean over restarts,

    q = sum over i of lam_i / lam * E[exp(-lam R_i)]         R = -log(q) / lam, the equivalent restart
    fraction = q  *  tau / s  *  lam s / (exp(lam s) - 1)

because a restart takes min(R_i, time to the next failure), whose mean is (1 - E[exp(-lam R_i)]) / lam, and what follows
it does not remember it. That also holds if R_i depends on the past, as it does with spares. Training between a fault
and the moment it is noticed is lost, whether the ranks wait (a hang) or go on with wrong numbers (silent corruption,
with a return to a checkpoint from before it), so both are part of R_i.

Spares: failed machines are away for their repair, independently of each other, so their number is Poisson with mean
a = sum of lam_i * repair_i (Palm's theorem, for any distribution of repairs), also at the moment of a failure. None of
n spares is free with probability P(N >= n); then a machine is borrowed, which takes `replace_s`, until a repair ends.
"""

from __future__ import annotations

import bisect
import csv
import io
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path

from phalanx.bounded import read_text
from phalanx.check.job import cause_problems
from phalanx.config import values
from phalanx.config.cluster import Cause
from phalanx.errors import MOST_PROBLEMS, JobError
from phalanx.nearest import did_you_mean
from phalanx.simulate.goodput import SECONDS_PER_DAY, Goodput, at, best
from phalanx.units import counted, seconds

LLAMA_3 = Path(__file__).parent / "llama3_causes.csv"
TIMEOUT_S = 60.0
"""Seconds until a watchdog notices a hang, of the remedy."""
CHECK_S = 600.0
"""Seconds until checks of replicas notice corrupt numbers, of the remedy."""
MOST_CAUSES = 1000


COLUMNS = tuple(each.name for each in fields(Cause))
WAYS = ("crash", "timeout", "check")


def read_causes(path: Path) -> tuple[Cause, ...]:
    """Reads a table of causes: CSV with the columns `COLUMNS`, of which those with a default may be left out; lines
    that begin with # are comments. Raises JobError with every problem of it."""
    try:
        lines = read_text(path).splitlines()
        numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip() and line[0] != "#"]
        rows = [(number, next(csv.reader([line]))) for number, line in numbered]
    except (OSError, ValueError, csv.Error) as error:
        raise JobError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    names = [name.strip() for name in rows[0][1]] if rows else []
    problems = [
        f"{path}: {name!r} is no column{did_you_mean(name, COLUMNS)} (columns: {', '.join(COLUMNS)})"
        for name in names
        if name not in COLUMNS
    ]
    problems += [f"{path}: the column {name} is there twice" for name in {*names} if names.count(name) > 1]
    missing = [each.name for each in fields(Cause) if each.default is MISSING and each.name not in names]
    problems += [f"{path}: without the column{'s' * (len(missing) > 1)} {', '.join(missing)}"] if missing else []
    if not problems and not 0 < len(rows) - 1 <= MOST_CAUSES:
        problems.append(f"{path}: {len(rows) - 1:,} causes, where 1 to {MOST_CAUSES:,} are expected")
    if problems:
        raise JobError(problems)
    causes, places = list[Cause](), list[str]()
    for number, cells in rows[1:]:
        where = f"{path}, line {number}"
        if len(cells) != len(names):
            problems.append(f"{where}: {len(cells)} cells, where the header has {len(names)}")
        elif cause := values.row_from(dict(zip(names, map(str.strip, cells), strict=True)), Cause, where, problems):
            causes.append(cause)
            places.append(where)
    if problems := [*problems, *cause_problems(causes, places)]:
        raise JobError(problems[:MOST_PROBLEMS])
    return tuple(causes)


def as_csv(causes: Sequence[Cause]) -> str:
    """Returns a table of causes as `read_causes` reads it."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([COLUMNS, *(vars(each).values() for each in causes)])
    return text.getvalue().rstrip()


@dataclass(frozen=True)
class FailureSpec:
    """A job under failures: its causes, its devices, and what it does about them."""

    causes: tuple[Cause, ...]
    devices: int
    checkpoint_s: float
    """Seconds for which a save blocks training."""
    restart_s: float
    """Seconds from healthy machines to the next step: starting the ranks, loading, warming up."""
    interval_s: float | None = None
    """Seconds of training between two saves; None: the best."""
    spares: int = 0
    """Machines that stand by."""
    devices_per_node: int = 8
    replicas: int = 1
    """Replicas that come and go, so that a failure takes only one of them away; 1: it restarts the whole job."""
    step_s: float = 0.0
    """Seconds that a failure costs the other replicas: the step it came in."""

    @property
    def rates(self) -> list[float]:
        """Failures per second of each cause."""
        return [self.devices * each.per_device_day / SECONDS_PER_DAY for each in self.causes]

    @property
    def away(self) -> float:
        """The mean number of machines in repair."""
        pairs = zip(self.rates, self.causes, strict=True)
        return math.fsum(rate * each.repair_h * 3600 for rate, each in pairs if each.replace_s)

    @property
    def shortage(self) -> float:
        """The probability that no spare is free at a failure."""
        away = self.away
        if away == 0:
            return float(self.spares == 0)
        most = int(40 * math.sqrt(away)) + 40  # no fewer and no more are ever away
        counts = range(max(0, int(away) - most), min(self.spares, int(away) + most))
        terms = (math.exp(n * math.log(away) - away - math.lgamma(n + 1)) for n in counts)
        return max(0.0, 1 - math.fsum(terms))

    def restart(self, cause: Cause, *, spare: bool) -> float:
        """Returns the seconds from a failure to the next step, with or without a free spare."""
        return cause.detect_s + self.restart_s + (0.0 if spare else cause.replace_s)


@dataclass(frozen=True)
class GoodputByCause:
    """The shares of a job's time, and those that each cause takes of them."""

    total: Goodput
    lost: tuple[float, ...]
    """By cause: restarts and rework."""
    shortage: float
    of_owned: float
    """Productive share of all devices, spares among them."""


def expected(spec: FailureSpec) -> GoodputByCause:
    """Returns the expected shares of time. Raises JobError for impossible figures."""
    if spec.spares < 0:
        raise JobError(f"spares: {spec.spares}, where 0 or more is needed")
    if (rate := math.fsum(spec.rates)) > 1:
        raise JobError(f"{spec.devices:,} devices fail {rate:.3g} times per second by these causes: none ever trains")
    if spec.replicas > 1:
        return _with_replicas(spec)
    shortage = spec.shortage
    rate = rate if rate > 1e-300 else 0.0
    total = rate / spec.devices * SECONDS_PER_DAY if spec.devices > 0 else 0.0
    waits = [(spec.restart(each, spare=True), spec.restart(each, spare=False)) for each in spec.causes]
    least = min(min(pair) for pair in waits)
    kept = [(1 - shortage) * math.exp(rate * (least - a)) + shortage * math.exp(rate * (least - b)) for a, b in waits]
    weights = [each / rate if rate else 0.0 for each in spec.rates]
    share = math.fsum(map(float.__mul__, weights, kept))
    equivalent = least - math.log(share) / rate if share else max(map(max, waits)) if rate else least
    given = (spec.devices, total, spec.checkpoint_s, equivalent)
    found = best(*given) if spec.interval_s is None else at(spec.interval_s, *given)
    lost = tuple(
        weight * (found.rework - math.expm1(-rate * least) + math.exp(-rate * least) * (1 - q))
        for weight, q in zip(weights, kept, strict=True)
    )
    owned = found.fraction * spec.devices / (spec.devices + spec.spares * spec.devices_per_node)
    return GoodputByCause(found, lost, shortage, owned)


def _with_replicas(spec: FailureSpec) -> GoodputByCause:
    """Returns the same if replicas come and go. The number that is away is Poisson, as that of machines in repair, and
    each takes its share of the whole; all wait for the step in which one is lost, and while a hang is not noticed.
    Wrong numbers reach all replicas by their sums, so these still go back to a checkpoint."""
    wrong = [each.found_by == "check" for each in spec.causes]
    alone = replace(spec, replicas=1)
    causes = tuple(each if bad else replace(each, count=0.0) for each, bad in zip(spec.causes, wrong, strict=True))
    back, shortage = expected(replace(alone, causes=causes)), spec.shortage
    stalls, away = list[float](), list[float]()
    for each, rate, bad in zip(spec.causes, spec.rates, wrong, strict=True):
        waits = (1 - shortage) * spec.restart(each, spare=True) + shortage * spec.restart(each, spare=False)
        stalls.append(0.0 if bad else rate * (spec.step_s + each.detect_s * (each.found_by == "timeout")))
        away.append(0.0 if bad else rate * waits / spec.replicas)
    kept = max(0.0, 1 - math.fsum(stalls)) * max(0.0, 1 - math.fsum(away))
    fraction, saving, rework = (share * kept for share in (back.total.fraction, back.total.saving, back.total.rework))
    mtbf_s = 1 / rate if (rate := math.fsum(spec.rates)) else math.inf
    shares = {"fraction": fraction, "saving": saving, "rework": rework, "restarting": 1 - fraction - saving - rework}
    lost = tuple(sum(of) for of in zip((each * kept for each in back.lost), stalls, away, strict=True))
    owned = fraction * spec.devices / (spec.devices + spec.spares * spec.devices_per_node)
    return GoodputByCause(replace(back.total, mtbf_s=mtbf_s, **shares), lost, shortage, owned)


def best_spares(spec: FailureSpec) -> int:
    """Returns the number of spares with the most productive time per device, spares among them."""
    width = 10 * math.sqrt(spec.away) + 10  # outside, a spare is never free, or always
    tried = [0, *range(max(1, int(spec.away - width)), int(spec.away + width))]
    return max(tried, key=lambda spares: expected(replace(spec, spares=spares)).of_owned)


@dataclass(frozen=True)
class Remedy:
    name: str
    spec: FailureSpec
    found: GoodputByCause


def remedies(spec: FailureSpec, background_s: float, replicas: int = 1) -> list[Remedy]:
    """Returns what each remedy would bring, alone, and all of them, first the job as it is. `background_s` are the
    seconds for which a save in the background blocks training, `replicas` those that could come and go."""
    caps = {"crash": math.inf, "timeout": TIMEOUT_S, "check": CHECK_S}

    def noticed(given: FailureSpec, *ways: str) -> FailureSpec:
        found = (
            replace(each, detect_s=min(each.detect_s, caps[each.found_by])) if each.found_by in ways else each
            for each in given.causes
        )
        return replace(given, causes=tuple(found))

    saved = replace(spec, checkpoint_s=min(spec.checkpoint_s, background_s))
    faster = replace(spec, restart_s=spec.restart_s / 2)
    spare = replace(spec, spares=max(spec.spares, best_spares(spec)))
    together = noticed(replace(saved, interval_s=None, restart_s=faster.restart_s), *WAYS)
    together = replace(together, replicas=replicas, spares=max(spec.spares, best_spares(together)))
    optimal = replace(spec, interval_s=None)
    named = {
        "as given": spec,
        "save at the best interval": optimal,
        f"save in the background ({seconds(background_s)})": saved,
        "both: background, best interval": replace(saved, interval_s=None),
        f"notice hangs in {TIMEOUT_S:g} s": noticed(spec, "timeout"),
        f"check for corruption every {CHECK_S / 60:g} min": noticed(spec, "check"),
        counted(spare.spares, "hot spare"): spare,
        f"restart in {seconds(faster.restart_s)}": faster,
        **({f"{replicas} replicas that come and go": replace(spec, replicas=replicas)} if replicas > 1 else {}),
        f"all, with {counted(together.spares, 'spare')}": together,
    }
    return [Remedy(name, each, expected(each)) for name, each in named.items()]


@dataclass
class FailureRun:
    """The seconds of one simulated run, by what they are spent for."""

    fraction: float = 0.0
    saving: float = 0.0
    rework: float = 0.0
    restarting: float = 0.0
    failures: int = 0
    short: int = 0
    """Failures without a free spare."""
    by_cause: dict[str, float] = field(default_factory=dict[str, float])
    """Restarts and rework."""

    @property
    def seconds(self) -> float:
        return self.fraction + self.saving + self.rework + self.restarting


def simulate_failures(spec: FailureSpec, days: float, seed: int) -> FailureRun:
    """Draws failures one after the other until `days` have passed, with spares that go into repair and come back, and
    returns the time of each kind, up to the first failure after the end. The run begins with as many machines away as
    a long one has."""
    rate, outcome = math.fsum(spec.rates), FailureRun(by_cause=dict.fromkeys((each.cause for each in spec.causes), 0.0))
    interval = expected(spec).total.interval_s if spec.interval_s is None else spec.interval_s
    if rate == 0 or not 0 < interval < math.inf:
        raise JobError("a simulation needs failures, and an interval between saves")
    generator, segment = random.Random(seed), interval + spec.checkpoint_s
    sums = [*itertools.accumulate(spec.rates)]
    away: list[float] = []  # when each machine comes back, ascending
    clock = generator.expovariate(rate) - max(each.repair_h for each in spec.causes) * 3600
    rest = 0.0  # trained since the newest save
    while True:
        cause = spec.causes[min(bisect.bisect(sums, generator.random() * sums[-1]), len(sums) - 1)]
        gap = generator.expovariate(rate)
        del away[: bisect.bisect(away, clock)]
        spare = len(away) < spec.spares
        if cause.replace_s:
            bisect.insort(away, clock + cause.repair_h * 3600)
        if clock >= days * SECONDS_PER_DAY:
            return outcome
        if clock >= 0:
            restart = min(gap, spec.restart(cause, spare=spare))
            outcome.by_cause[cause.cause] += rest + restart
            whole, rest = divmod(gap - restart, segment)
            outcome.restarting += restart
            outcome.fraction += whole * interval
            outcome.saving += whole * spec.checkpoint_s
            outcome.rework += rest
            outcome.failures += 1
            outcome.short += bool(cause.replace_s) and not spare
        clock += gap


def spread(outcomes: Sequence[FailureRun]) -> tuple[float, float, float]:
    """Returns the mean productive share of simulated runs, and those below and above which one of ten lies."""
    shares = sorted(each.fraction / each.seconds for each in outcomes)
    tenth = len(shares) // 10
    return math.fsum(shares) / len(shares), shares[tenth], shares[-1 - tenth]
