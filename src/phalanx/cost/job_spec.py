"""The spec of a job's step, for the cost model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from phalanx.blocks.kinds import block_kinds
from phalanx.config.cluster import with_processes
from phalanx.config.clusters import CLUSTERS, cluster_of
from phalanx.config.corpora import compared_in
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.config.precision import Products
from phalanx.cost.block_memory import KeptBytes
from phalanx.cost.frameworks import PHALANX, PHALANX_CPU
from phalanx.cost.held import Content, LayerKind
from phalanx.cost.kernels import peak_flops
from phalanx.cost.loss_memory import LossParts
from phalanx.cost.rank_memory import StepParts, step_memory
from phalanx.cost.rank_time import rank_time
from phalanx.cost.spec import Framework, StepSpec, as_used_by
from phalanx.cost.step_state import require_host
from phalanx.errors import JobError
from phalanx.partition.derived import MODES, PARAMETER_BYTES, Mode, is_file, legal_modes, schedule_of, solve, with_modes
from phalanx.partition.document_sample import DocumentSample
from phalanx.schedule import catalogue
from phalanx.techniques.catalogue import techniques_of, update_costs

NOMINAL = "dgx-h100:1"
"""The machine by whose times a budget of recomputation is shared out where the devices are not known."""
SHARE = 0.1
"""The least share of logits in the memory at the peak for which the loss computes them in chunks."""


def with_recompute_budget(spec: StepSpec) -> StepSpec:
    """Returns the spec with a mode, or modes by layer, in place of a budget (`recompute=0.4`): of each kind of block in
    each stage the first layers have a leaner mode than the last, so that all save at most that share of the bytes
    between full recomputation and none. Of the modes those are taken that save the most seconds per byte."""
    if isinstance(spec.layout.recompute, str):
        return spec
    budget, layers = spec.layout.recompute, spec.model.n_layers
    plain = replace(spec, layout=replace(spec.layout, recompute="none", recompute_cut=f"{layers}*none"))
    if not spec.cluster.accelerator.name:  # any device orders its modes much alike
        known = cluster_of(NOMINAL).accelerator
        plain = replace(plain, cluster=replace(plain.cluster, accelerator=known))
    step = StepParts(plain)
    every, kinds = list[Mode](MODES[:1] * layers), block_kinds(spec.model)
    for kind in dict.fromkeys(kinds):
        costs = []
        for mode in legal_modes(spec.layout.tiles):
            layer = LayerKind(kind, mode)
            seconds = rank_time(plain, Content(((layer, 1),), False, False)).total
            costs.append((KeptBytes(step, layer).kept, seconds, mode))
        for stage in spec.stages or (range(layers),):
            mine = [layer for layer in stage if kinds[layer] == kind]
            for layer, mode in zip(mine, _modes_within(costs, budget, len(mine)), strict=True):
                every[layer] = mode
    return replace(spec, layout=with_modes(spec.layout, every))


def _modes_within(costs: Sequence[tuple[float, float, Mode]], budget: float, count: int) -> list[Mode]:
    """Returns the modes of `count` equal blocks, the leanest first, from the bytes and seconds of each mode."""
    hull = list[tuple[float, float, Mode]]()
    for size, seconds, mode in sorted(costs):
        if hull and seconds >= hull[-1][1]:
            continue  # takes more of both
        while len(hull) > 1:
            (before, slow, _), (middle, slower, _) = hull[-2:]
            if (slow - slower) * (size - middle) > (slower - seconds) * (middle - before):
                break
            hull.pop()  # a mixture of its neighbours is faster
        hull.append((size, seconds, mode))
    room = hull[0][0] + budget * (max(size for size, _, _ in costs) - hull[0][0])
    place = max(n for n, (size, _, _) in enumerate(hull) if size <= room or not n)
    lean, large = hull[place], hull[min(place + 1, len(hull) - 1)]
    many = int(count * (room - lean[0]) / (large[0] - lean[0]) + 1e-9) if lean is not large else 0
    return [(lean if number < count - many else large)[2] for number in range(count)]


def with_loss_chunk(spec: StepSpec) -> StepSpec:
    """Returns the spec with a number in place of `loss_chunk=auto`: without chunks if the logits of a micro-batch would
    be less than a tenth of the memory of their rank at its peak, and fit."""
    if spec.layout.loss_chunk != "auto":
        return spec
    whole = _with(spec, 0)
    step = StepParts(whole)
    parts = [LossParts(step, flight) for flight in step.flights]
    fits = spec.cluster.accelerator.memory_gib * 2**30 or float("inf")
    for memory, rank in zip(step_memory(whole), parts, strict=True):
        logits = rank.logits()[0] + rank.waiting_logits()
        if logits >= SHARE * memory.allocated or (logits and memory.needed > fits):
            # The rank's tokens of a micro-batch, or of a slice of it.
            return _with(spec, spec.layout.logits_of(int(step.pass_tokens)))
    return whole


def _with(spec: StepSpec, chunk: int) -> StepSpec:
    layout: Layout = replace(spec.layout, loss_chunk=chunk)
    return replace(spec, layout=layout)


def on_known_cluster(job: Job, device: str = "") -> Job:
    """Returns the job on its cluster, or on cluster=local if it names none. Raises JobError if nothing was measured, or
    if the ranks are on another kind of `device` (cpu, cuda) than was measured."""
    if job.cluster.accelerator.name:
        return job
    local = cluster_of("local")
    if device and local.device != device:
        raise JobError(f"cluster=local is a measured {local.device}, the ranks are on {device}; name the cluster")
    nodes = job.cluster.nodes
    return replace(job, cluster=replace(local, nodes=nodes, devices_per_node=max(1, job.layout.processes // nodes)))


DESCRIBED_SPREAD = 1.15
"""Factor by which the interval of a machine that the user describes is wider on either side: the same H100s described
by their data sheet were predicted 14 % faster than the calibrated preset."""


def step_spec(job: Job, vocab: int) -> StepSpec:
    """Returns the spec of a job. Raises JobError if nothing is known about the devices."""
    if not job.cluster.accelerator.name:
        known = ", ".join(list(CLUSTERS)[:8])
        raise JobError(
            "cluster: nothing is known about the devices; name a machine, such as cluster=dgx-h100:8 (known: "
            f"{known}, …), describe one under cluster.accelerator, or measure this one with `phalanx bench compute` "
            "and `phalanx bench comm` and say cluster=local"
        )
    if problems := [*_unknown_figures(job)]:
        raise JobError(problems)
    require_host(job.cluster, job.layout)
    return rank_spec(job, vocab)


def _unknown_figures(job: Job) -> Iterator[str]:
    """Yields what a prediction needs and the machine does not state, of a named machine, too."""
    cluster, device, world = job.cluster, job.cluster.accelerator, job.layout.world
    products = _products(job)
    if not peak_flops(device, products):
        yield f"cluster.accelerator: {device.name} has no known rate of products in {products}: set {products}_tflops"
    if not device.bandwidth_gbs:
        yield f"cluster.accelerator: the memory bandwidth of {device.name} is not known: set bandwidth_gbs"
    within = min(world, cluster.devices_per_node or world)
    links = ["cluster.intra.gbs"] * (within > 1 and not cluster.intra.gbs)
    if links := links + ["cluster.inter.gbs"] * (world > within and not cluster.inter.gbs):
        yield (
            f"cluster: {world} devices, and nothing is known about the links between them; set {' and '.join(links)}, "
            "or measure them with `phalanx bench comm`"
        )


def _products(job: Job) -> Products:
    """Returns the number format of the job's matrix products."""
    precision = job.train.precision
    assert precision != "auto", "loading a job chooses one (check/load.py)"
    return "fp32" if precision in ("fp32", "fp64") else precision


def rank_spec(job: Job, vocab: int, device: str = "") -> StepSpec:
    """Returns the spec of a job without checking that the devices are known, for the memory of a rank; on a `device`,
    "cpu" or "cuda", if it is not the cluster that says which."""
    if device:
        job = replace(job, cluster=replace(job.cluster, device=device))  # pyrefly: ignore[bad-argument-type]
    divisor = job.model.logit_divisor * job.train.grpo.temperature
    model = replace(job.model, vocab_size=vocab, logit_divisor=divisor)
    cluster = with_processes(job.cluster, job.cluster.devices_per_node or job.layout.world)
    cluster, framework = as_used_by(job.layout.world, cluster, framework_of(job))
    spec = StepSpec(
        model=model,
        cluster=cluster,
        layout=job.layout,
        batch=solve(job.train.global_batch, job.layout),
        products=_products(job),
        width=PARAMETER_BYTES[job.train.precision],
        framework=framework,
        optimizer=job.optimizer,
        stages=stages(model, job.layout),
        documents=stated_documents(job),
        more=update_costs(job),
        compared=(compared := compared_in(job.data)),
        rollout=job.train.grpo if compared == "completions" else None,
    )
    return with_loss_chunk(with_recompute_budget(spec))


def stated_documents(job: Job) -> DocumentSample | None:
    """Returns an example of documents of the length that the job states, without lengths if it states none; None where
    attention crosses documents."""
    data, seq_len = job.data, job.model.seq_len
    if not data.document_mask:
        return None
    return DocumentSample.example(seq_len, data.document_tokens) if data.document_tokens else DocumentSample()


def framework_of(job: Job) -> Framework:
    """Returns Phalanx as the job runs it."""
    if job.cluster.device == "cpu":
        return _as_trained(job, PHALANX_CPU)
    own = PHALANX.alone or PHALANX
    # What `bench` has measured is what the devices reach: no cluster's loss is to be added to it.
    shared = replace(PHALANX, slowdown=own.slowdown) if job.cluster.calibration.compute.provenance.date else PHALANX
    if job.cluster.accelerator.older < 1:  # torch takes cuDNN's attention from Hopper on
        own = replace(own, flash="cudnn")
    return replace(_as_trained(job, shared), alone=_as_trained(job, own))


def _as_trained(job: Job, framework: Framework) -> Framework:
    """Returns a framework with what the job's options change."""
    profile = framework.memory_profile
    for technique in techniques_of(job).values():
        effect = technique.effect(job)
        framework = replace(framework, passes=effect.passes * framework.passes, **effect.framework)
        profile = replace(profile, **effect.profile)
    widened = 1.0 if job.cluster.preset else DESCRIBED_SPREAD  # nobody measured this machine
    return replace(framework, memory_profile=profile, widened=widened)


def stages(model: ModelConfig, layout: Layout) -> tuple[range, ...]:
    """Returns the layers of every stage, as `phalanx train` cuts them; empty without a pipeline.

    Raises JobError if the model has too few layers, or if pp_cut or a schedule's file does not fit."""
    if layout.pp == 1:
        return ()
    if is_file(layout.schedule):
        count = schedule_of(layout, 1).stages
    else:
        count = catalogue.stages(layout.schedule, layout.pp, layout.pp_chunks)
    return _stages(model, count, layout.pp_cut, layout.pp, layout.schedule)


@lru_cache(4096)
def _stages(model: ModelConfig, count: int, pp_cut: str, pp: int, schedule: str) -> tuple[range, ...]:
    from phalanx.partition.cut import stages_of

    return stages_of(model, Layout(pp=pp, pp_cut=pp_cut, schedule=schedule), count)
