"""The subject of a plan, and the space of its legal layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from math import gcd
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.axes.catalogue import EXPERTS
from phalanx.check.job import layout_problems
from phalanx.config.cluster import Cluster, with_processes
from phalanx.config.corpora import PAIR, Compared, has_pairs
from phalanx.config.job import GrpoOptions, Job, Optimizer, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.config.precision import Products
from phalanx.cost.intervals import memory_factors
from phalanx.cost.job_spec import framework_of, stages, step_spec
from phalanx.cost.spec import Framework, StepSpec, as_used_by
from phalanx.errors import JobError
from phalanx.optimizers.entry import NOTHING_MORE, UpdateCosts
from phalanx.partition.derived import DEFAULT_GLOBAL_BATCH, MODES, Batch, legal_hpz, legal_modes, solve
from phalanx.partition.document_sample import DocumentSample
from phalanx.plan.simplicity import EQUAL, TIED, TieBand
from phalanx.schedule import catalogue
from phalanx.techniques.catalogue import technique_problems


@dataclass(frozen=True)
class PlanRequest:
    """The question of a search: which layout is the fastest that fits?"""

    model: ModelConfig
    """The model, with its vocabulary size set."""
    cluster: Cluster
    global_batch: int
    """Sequences per step."""
    products: Products = "bf16"
    width: int = 2
    """Bytes per element of a parameter and of an activation."""
    framework: Framework = field(default_factory=Framework)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fixed fields of the layout with their values."""
    worlds: tuple[int, ...] = ()
    """Numbers of devices that may be used; empty: all of the cluster's."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    together: int = 1
    """Sequences that belong together: micro-batches are multiples of it."""
    documents: DocumentSample | None = None
    """The documents that attention must not cross; None: it crosses them."""
    more: UpdateCosts = NOTHING_MORE
    """What techniques add to the optimizer's step."""
    compared: Compared = ""
    rollout: GrpoOptions | None = None
    """As in StepSpec: whose outputs the loss compares, and how completions are generated."""
    headroom: float | None = None
    """Share of a device's memory that stays free beyond the upper end of the predicted interval; None: what is
    predicted may fill the device."""
    band: TieBand = EQUAL
    """Shares by which step times may differ and count as equal, so that the simplest layout wins."""

    @property
    def limit(self) -> float:
        """Bytes that a layout may need of a device."""
        memory = self.cluster.accelerator.memory_gib * 2**30
        return memory if self.headroom is None else memory * (1 - self.headroom) / memory_factors()[1]

    @property
    def regathers(self) -> bool:
        """Whether sequence parallelism gathers its inputs again in the backward pass, as Megatron does: the gather
        overlaps with the gradients of weights, and all that it saves is a share of the activations."""
        return bool(self.fixed.get("sp_regather", self.fixed.get("tiles", 1) == 1))

    @property
    def devices(self) -> tuple[int, ...]:
        """Numbers of devices that may be used."""
        return self.worlds or (self.cluster.devices,)

    def each(self) -> Iterator[PlanRequest]:
        """Yields one request per number of devices. Processes on the same CPU each have their part of it."""
        for world in self.devices:
            per_node = max(1, world // self.cluster.nodes)
            cluster, framework = as_used_by(world, with_processes(self.cluster, per_node), self.framework)
            yield replace(self, cluster=cluster, framework=framework, worlds=(world,))

    def spec(self, layout: Layout) -> StepSpec:
        """Returns the spec of one layout. Raises JobError or ValueError if it does not fit model or batch."""
        solved = solve(self.global_batch, layout)
        complete = replace(layout, micro_batch=solved.micro_batch, accumulation=solved.accumulation)
        return replace(self.unchecked_spec(complete, solved), stages=stages(self.model, complete))

    def unchecked_spec(self, layout: Layout, solved: Batch) -> StepSpec:
        """Returns the spec of a layout whose stages are as even as possible."""
        return StepSpec(
            self.model,
            self.cluster,
            layout,
            solved,
            self.products,
            self.width,
            self.framework,
            optimizer=self.optimizer,
            documents=self.documents,
            more=self.more,
            compared=self.compared,
            rollout=self.rollout,
        )

    def job(self, layout: Layout) -> Job:
        """Returns a job with a layout."""
        train = Train(global_batch=self.global_batch)
        return Job(self.model, self.cluster, layout, optimizer=self.optimizer, train=train)

    def problems(self, layout: Layout) -> list[str]:
        """Returns the conflicts of a layout with model, devices and batch, each with its equation; empty if it is
        legal."""
        job = self.job(layout)
        found = [message for _, message in (*layout_problems(job), *technique_problems(job))]
        if found:
            return found
        try:
            self.spec(layout)
        except (JobError, ValueError) as error:
            return [str(error)]
        return []


def plan_request(job: Job, vocab: int, fixed: Mapping[str, Any] | None = None) -> PlanRequest:
    """Returns the request of a job. Raises JobError if the devices or their number are not known."""
    if job.layout.axes.sizes:
        raise JobError(
            f"layout.axes: the planner does not choose axes of packages; leave {job.layout.replica_axis} out"
        )
    if not isinstance((fixed or {}).get("recompute", ""), str):
        raise JobError(
            "layout.recompute: the planner shares out the memory itself; leave the budget out, or fix a mode"
        )
    if not job.cluster.devices:
        raise JobError("cluster: how many devices are there? Set cluster.devices_per_node, or name a machine")
    # The spec of the simplest layout has everything that does not depend on the layout.
    spec = step_spec(replace(job, layout=Layout()), vocab)
    if job.cluster.devices > 1 and not (job.cluster.intra.gbs or job.cluster.inter.gbs):
        raise JobError(
            f"cluster: {job.cluster.devices} devices, and nothing is known about the links between them; set "
            "cluster.intra.gbs and cluster.inter.gbs, or measure them with `phalanx bench comm`"
        )
    return PlanRequest(
        spec.model,
        job.cluster,
        job.train.global_batch or DEFAULT_GLOBAL_BATCH,
        spec.products,
        spec.width,
        framework_of(job),
        dict(fixed or {}),
        optimizer=spec.optimizer,
        together=PAIR if has_pairs(job.data) else 1,
        documents=spec.documents,
        more=spec.more,
        compared=spec.compared,
        rollout=spec.rollout,
        headroom=job.plan.headroom,
        band=TIED,
    )


LEAST_TOKENS = 1024
"""Least tokens of a sequence per context rank; for short sequences a quarter of the sequence."""
MOST_TOKENS = 65_536
"""Most tokens of a micro-batch per device, if it has more than one sequence: more make nothing faster."""
LEAST_TP, NEIGHBOURHOODS = 8, 2
"""Least upper limit of the tp degree, and the limit in groups of neighbouring devices."""
RECOMPUTE = MODES


class MeshDegrees(NamedTuple):
    """The degrees of all axes."""

    tp: int
    sp: bool
    cp: int
    cp_ulysses: int
    pp: int
    dp_shard: int
    dp_replicate: int
    ep: int
    etp: int


class StateSharding(NamedTuple):
    """The sharding of the state over dp_shard × cp ranks, and when its collectives run."""

    zero: int
    reshard: bool
    accumulate: str


class Scheduled(NamedTuple):
    """A schedule and its stages per rank (0: the schedule's own number)."""

    schedule: str
    pp_chunks: int


STATES = (
    StateSharding(3, True, "local"),
    StateSharding(3, False, "local"),
    StateSharding(3, True, "sharded"),
    StateSharding(2, True, "local"),
    StateSharding(2, True, "sharded"),
    StateSharding(1, True, "local"),
)
"""The state shardings. The first, the layout's default, also stands for ranks that share nothing."""


@dataclass(frozen=True)
class Rows:
    """Layouts, one per row."""

    pair: NDArray[np.int32]
    """Number of the row's pair."""
    scheduled: NDArray[np.int32]
    """Number of the row's schedule in the space; `state` counts in STATES, `recompute` in RECOMPUTE."""
    state: NDArray[np.int32]
    recompute: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.pair)

    def select(self, kept: NDArray[Any]) -> Rows:
        """Returns some of the rows, given by a mask or by their numbers in order."""
        return Rows(self.pair[kept], self.scheduled[kept], self.state[kept], self.recompute[kept])


def joined(blocks: Sequence[Rows]) -> Rows:
    """Returns the rows of all blocks, one after the other."""
    return Rows(*(np.concatenate([getattr(rows, name.name) for rows in blocks]) for name in fields(Rows)))


@dataclass(frozen=True)
class Space:
    """All layouts: pairs of a mesh and a micro-batch, each with all its options."""

    base: Layout
    """The layout of the fields that all share."""
    regathers: bool
    """PlanRequest.regathers."""
    meshes: list[MeshDegrees]
    schedules: list[Scheduled]
    mesh: NDArray[np.int32]
    """Number of the mesh, by pair."""
    micro_batch: NDArray[np.int32]
    accumulation: NDArray[np.int32]
    options: list[NDArray[np.int32]]
    """The different options of pairs, one per row: schedule, state, recomputation."""
    option_of: NDArray[np.int32]
    """By pair, the number of its own options."""

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Number of layouts, by pair."""
        return np.array(list(map(len, self.options)))[self.option_of]

    @property
    def size(self) -> int:
        """Number of layouts."""
        return int(self.sizes.sum())

    def count(self, keep: Callable[[NDArray[np.int32]], NDArray[np.bool_]]) -> NDArray[np.int64]:
        """Returns by pair the number of its options to `keep`."""
        return np.array([int(keep(options).sum()) for options in self.options])[self.option_of]

    @cached_property
    def available(self) -> NDArray[np.bool_]:
        """Whether a recomputation, a schedule and a state are among the options, by the number of these."""
        found = np.zeros((len(self.options), len(RECOMPUTE), len(self.schedules), len(STATES)), bool)
        for number, options in enumerate(self.options):
            scheduled, state, mode = options.T
            found[number, mode, scheduled, state] = True
        return found

    def rows(self, pairs: NDArray[Any]) -> Rows:
        """Returns every layout of some pairs."""
        found = [self.options[number] for number in self.option_of[pairs].tolist()]
        table = np.concatenate(found) if found else np.empty((0, 3), np.int32)
        return Rows(np.repeat(pairs, list(map(len, found))).astype(np.int32), table[:, 0], table[:, 1], table[:, 2])

    def layout(self, rows: Rows, number: int) -> Layout:
        """Returns the layout of a row."""
        pair = rows.pair[number]
        named: dict[str, Any] = self.meshes[self.mesh[pair]]._asdict()
        named |= self.schedules[rows.scheduled[number]]._asdict()
        named |= STATES[rows.state[number]]._asdict()
        named["sp_regather"] = named["sp"] and self.regathers
        named["recompute"] = RECOMPUTE[rows.recompute[number]]
        named["micro_batch"] = int(self.micro_batch[pair])
        named["accumulation"] = int(self.accumulation[pair])
        return replace(self.base, **named)

    def column(self, name: str) -> NDArray[np.int64]:
        """Returns a field of the mesh, by pair."""
        return self._degrees[MeshDegrees._fields.index(name)][self.mesh]

    @cached_property
    def _degrees(self) -> NDArray[np.int64]:
        return np.array(self.meshes, np.int64).reshape(-1, len(MeshDegrees._fields)).T


def space_of(request: PlanRequest) -> Space:
    """Returns the space of a request. Raises JobError if the fixed fields leave no layout."""
    fixed: dict[str, Any] = {**request.fixed, "sp_regather": False}
    base, regathers = replace(Layout(), **fixed), request.regathers
    meshes = [mesh for world in request.devices for mesh in _meshes(request, world) if _takes_hpz(base, mesh)]
    schedules: dict[Scheduled, int] = {}
    options: list[NDArray[np.int32]] = []
    numbers: dict[tuple[int, int, bool], int] = {}
    """The number of the options, by pipeline ranks, micro-batches and whether ranks share state; -1 for none."""
    batches: dict[tuple[int, int, int, bool], NDArray[np.int32]] = {}
    """Micro-batch, accumulation and number of the options, a row each, of meshes that have the same."""
    found = []
    for mesh in meshes:
        shared, share = mesh.dp_shard * mesh.cp > 1, request.global_batch // (mesh.dp_shard * mesh.dp_replicate)
        same = mesh.pp, share, mesh.cp, shared
        if same not in batches:
            rows = []
            for micro, m in _batches(request, share, mesh.cp):
                key = mesh.pp, m, shared
                if key not in numbers:
                    some = _options(request, *key, schedules)
                    numbers[key] = len(options) if len(some) else -1
                    options += [some] * bool(len(some))
                rows.append((micro, m, numbers[key]))
            table = np.array(rows, np.int32).reshape(-1, 3)
            batches[same] = table[table[:, 2] >= 0]
        found.append(batches[same])
    mesh_of = np.repeat(np.arange(len(meshes), dtype=np.int32), list(map(len, found)))
    if not len(mesh_of):
        raise JobError(_nothing(request))
    micro_batch, accumulation, option_of = np.concatenate(found).T.copy()
    return Space(base, regathers, meshes, list(schedules), mesh_of, micro_batch, accumulation, options, option_of)


def _nothing(request: PlanRequest) -> str:
    devices = " or ".join(str(world) for world in request.devices)
    fixed = replace(Layout(), **request.fixed).line() if request.fixed else ""
    return (
        f"no layout of {devices} devices is legal for this model with global batch {request.global_batch}"
        + (f" and {fixed}" if fixed else "")
        + ": data ranks must divide the global batch, tp the heads, and there must be as many layers as stages"
    )


def _meshes(request: PlanRequest, world: int) -> Iterator[MeshDegrees]:
    """Yields every mesh of `world` devices."""
    model, fixed = request.model, request.fixed
    most_tp = max(LEAST_TP, NEIGHBOURHOODS * request.cluster.joined)
    for tp, sp, cp, ulysses in _inner(model, world, most_tp, fixed):
        either = [0, 1] if sp and _folds(request, tp) else [0]
        node = fixed.get("ep_node", 1)
        etps = _kept(either, fixed, "etp")
        for pp in _kept(divisors(world // (tp * cp)), fixed, "pp"):
            if pp > model.most_stages:
                continue
            data = world // (tp * cp * pp)
            if request.global_batch % data:
                continue
            for shard in _kept(divisors(data), fixed, "dp_shard"):
                if not _allowed(fixed, "dp_replicate", data // shard):
                    continue
                if data == shard and fixed.get("compression", "none") != "none":
                    continue
                for etp in etps:
                    most = gcd(shard * cp * (tp if etp else 1), model.moe.n_experts or 1)
                    for ep in _kept(divisors(most), fixed, "ep"):
                        if not (etp and ep % tp) and (node == 1 or (ep > node and ep % node == 0)):
                            yield MeshDegrees(tp, sp, cp, ulysses, pp, shard, data // shard, ep, etp)


def _inner(model: ModelConfig, world: int, most_tp: int, fixed: Mapping[str, Any]) -> list[tuple[int, bool, int, int]]:
    """Returns legal combinations of tp, sp, cp and cp_ulysses."""
    found = []
    most_cp = max(4, model.seq_len // LEAST_TOKENS)
    fixed = {"sp": True, **fixed} if fixed.get("sp_regather") else fixed
    for tp in _kept(divisors(world, most_tp), fixed, "tp"):
        for sp in _kept([False, True] if tp > 1 else [False], fixed, "sp"):
            for cp in _kept(divisors(world // tp, most_cp), fixed, "cp"):
                for ulysses in _kept(sorted({1, cp}), fixed, "cp_ulysses"):
                    layout = replace(Layout(), tp=tp, sp=sp, cp=cp, cp_ulysses=ulysses)
                    job = Job(model=model, cluster=Cluster(), layout=layout, train=Train(global_batch=1))
                    if not any(True for _ in layout_problems(job)):
                        found.append((tp, sp, cp, ulysses))
    return found


def _folds(request: PlanRequest, tp: int) -> bool:
    """Returns whether tensor ranks may hold whole experts: not in frameworks that are predicted to do so anyway."""
    layout = Layout(tp=tp, sp=True, ep=tp, etp=1)
    return not request.framework.ep_folds and not any(EXPERTS.problems(request.job(layout)))


def _takes_hpz(base: Layout, mesh: MeshDegrees) -> bool:
    """Returns whether as many ranks of a mesh as `hpz` can keep a second copy of the parameters."""
    return base.hpz == 1 or base.hpz in legal_hpz(
        replace(base, dp_shard=mesh.dp_shard, cp=mesh.cp, tp=mesh.tp, ep=mesh.ep, etp=mesh.etp)
    )


def _batches(request: PlanRequest, share: int, cp: int) -> Iterator[tuple[int, int]]:
    """Yields micro-batch sizes with their accumulation, from the sequences of a data rank."""
    most = max(1, MOST_TOKENS * cp // request.model.seq_len)
    sizes = [n for n in divisors(share, most) if n == share or _few_factors(n)]
    for micro in _kept(
        sizes if "micro_batch" not in request.fixed else divisors(share), request.fixed, "micro_batch", 0
    ):
        if micro % request.together == 0 and _allowed(request.fixed, "accumulation", share // micro, unset=0):
            yield micro, share // micro


def _few_factors(number: int) -> bool:
    """Returns whether a number is a power of two or three times one: sizes of micro-batches that are tried."""
    odd = number // (number & -number)
    return odd in (1, 3)


def _options(request: PlanRequest, pp: int, m: int, shared: bool, known: dict[Scheduled, int]) -> NDArray[np.int32]:
    """Returns schedule, state and recomputation, as numbers, of every option for pp ranks and m micro-batches."""
    fixed = request.fixed
    states = [
        number
        for number, state in enumerate(STATES if shared else STATES[:1])
        if (state.accumulate == "local" or m > 1)
        and (fixed.get("hpz", 1) == 1 or (state.zero == 3 and state.reshard))
        and (fixed.get("compression") != "powersgd" or not shared or state.zero == 3)
        and (not shared or all(_allowed(fixed, name, value) for name, value in state._asdict().items()))
    ]
    legal = legal_modes(fixed.get("tiles", 1))
    modes = [number for number, mode in enumerate(RECOMPUTE) if mode in legal and _allowed(fixed, "recompute", mode)]
    schedules = [known.setdefault(scheduled, len(known)) for scheduled in _schedules(request, pp, m)]
    rows = [(scheduled, state, mode) for scheduled in schedules for state in states for mode in modes]
    return np.array(rows, np.int32).reshape(-1, 3)


def _schedules(request: PlanRequest, pp: int, m: int) -> Iterator[Scheduled]:
    fixed, layers = request.fixed, request.model.most_stages
    if pp == 1:
        yield Scheduled(fixed.get("schedule", Layout.schedule), fixed.get("pp_chunks", 0))
        return
    searched = [name for name, entry in catalogue.SCHEDULES.items() if entry.searched]
    for name in [fixed["schedule"]] if "schedule" in fixed else searched:
        if name not in catalogue.SCHEDULES:  # a file
            yield Scheduled(name, 0)
            continue
        entry = catalogue.SCHEDULES[name]
        for chunks in entry.searched_chunks:
            written = chunks if entry.takes_chunks else 0
            if not _allowed(fixed, "pp_chunks", written, unset=0):
                continue
            if catalogue.stages(name, pp, written) <= layers and not catalogue.problems(name, pp, m, written):
                yield Scheduled(name, written)


def _kept(values: list[Any], fixed: Mapping[str, Any], name: str, unset: Any = None) -> list[Any]:
    """Returns the values that the fixed fields allow."""
    return [value for value in values if _allowed(fixed, name, value, unset)]


def _allowed(fixed: Mapping[str, Any], name: str, value: Any, unset: Any = None) -> bool:
    """Returns whether a value equals the fixed one, or none is fixed, for which `unset` stands too."""
    return fixed.get(name, unset) in (value, unset)


@lru_cache(4096)
def _divisors(number: int) -> tuple[int, ...]:
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def divisors(number: int, most: int = 0) -> list[int]:
    """Returns the divisors of a number up to `most` (0: all), in order."""
    return [n for n in _divisors(number) if not most or n <= most]


OPEN = frozenset(
    {*MeshDegrees._fields, *StateSharding._fields, *Scheduled._fields, "recompute", "micro_batch", "accumulation"}
    & {field.name for field in fields(Layout)}
)
"""The fields of a layout that a search chooses."""
