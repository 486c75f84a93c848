"""A collective as data: which rank sends which elements to which, step by step, with the resulting counts.

Rings send the fewest bytes possible at a latency that grows with the ranks (Patarasuk & Yuan 2009); trees take the
fewest steps, each with the whole tensor; halving and doubling sends the bytes of the ring in a number of steps that
grows with the logarithm of the ranks (Thakur, Rabenseifner & Gropp 2005); HSDP and two-dimensional rings communicate
hierarchically, inside groups of ranks with fast links and between them (Mikami et al. 2018, "2D-Torus all-reduce").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Literal

from phalanx.errors import JobError
from phalanx.nearest import nearest
from phalanx.pictures.elements import COLOURS, NEUTRAL, document, heading, text
from phalanx.units import gib

Action = Literal["copy", "reduce"]


@dataclass(frozen=True, slots=True)
class ChunkMessage:
    """Elements that one rank sends to another."""

    source: int
    target: int
    span: range
    """The elements of the source's buffer that are sent."""
    action: Action
    """The target's operation: `copy` overwrites its elements, `reduce` combines them with its own."""
    shift: int = 0
    """Offset of the landing position in the target's buffer. Nonzero only for all-to-all."""

    @property
    def landing(self) -> range:
        """The elements of the target's buffer that are written."""
        return range(self.span.start + self.shift, self.span.stop + self.shift)


@dataclass(frozen=True, slots=True)
class CollectiveStep:
    """Messages that travel at the same time: every rank sends at most one of them and receives at most one.

    The data sent was there before the step. A step whose messages are all empty has none, and still counts.
    """

    phase: str
    messages: tuple[ChunkMessage, ...]


@dataclass(frozen=True)
class CollectiveProgram:
    """One collective among `ranks` ranks."""

    name: str
    ranks: int
    sizes: tuple[int, ...]
    """Elements of the buffer on each rank."""
    chunks: tuple[range, ...]
    """The parts into which the algorithm divides the tensor. If it is scattered, chunk r is for rank r."""
    steps: tuple[CollectiveStep, ...]

    @property
    def messages(self) -> list[ChunkMessage]:
        """All messages, in the order of the steps."""
        return list(chain.from_iterable(step.messages for step in self.steps))

    @property
    def reduces(self) -> bool:
        """True if any message is combined with the target's data."""
        return any(message.action == "reduce" for message in self.messages)

    def messages_sent(self) -> list[int]:
        """Returns the number of messages that each rank sends."""
        sources = [message.source for message in self.messages]
        return [sources.count(rank) for rank in range(self.ranks)]

    def elements_sent(self) -> list[int]:
        """Returns the elements that each rank sends; times the bytes of an element, this is its traffic."""
        sent = [0] * self.ranks
        for message in self.messages:
            sent[message.source] += len(message.span)
        return sent

    def critical_elements(self) -> int:
        """Returns the sum of the longest message of every step, in elements.

        In the alpha-beta model with one class of links (Thakur, Rabenseifner & Gropp 2005) the program takes
        len(steps)·alpha + critical_elements()·element_bytes·beta seconds.
        """
        return sum(max((len(message.span) for message in step.messages), default=0) for step in self.steps)


def chunked(n: int, parts: int) -> tuple[range, ...]:
    """Splits `n` elements into `parts` contiguous chunks whose sizes differ by at most 1, the longer ones first.

    Raises ValueError if n is negative or parts is not positive.
    """
    if n < 0 or parts < 1:
        raise ValueError(f"cannot divide {n} elements among {parts} ranks: need elements >= 0 and ranks >= 1")
    small, longer = divmod(n, parts)
    bounds = accumulate((small + (part < longer) for part in range(parts)), initial=0)
    return tuple(range(start, stop) for start, stop in pairwise(bounds))


def chunks_of(message: ChunkMessage, program: CollectiveProgram) -> list[int]:
    """Returns the chunks that have elements in a message of the program."""
    span = message.span
    return [
        index for index, chunk in enumerate(program.chunks) if max(chunk.start, span.start) < min(chunk.stop, span.stop)
    ]


def joined(chunks: Sequence[range]) -> range:
    """Returns neighbouring chunks as one span."""
    return range(chunks[0].start, chunks[-1].stop)


def _program(
    name: str, ranks: int, n: int, chunks: tuple[range, ...], steps: Sequence[CollectiveStep]
) -> CollectiveProgram:
    """Returns the program of an algorithm whose ranks all have buffers of `n` elements."""
    return CollectiveProgram(name, ranks, (n,) * ranks, chunks, tuple(steps))


def step(phase: str, messages: Iterable[ChunkMessage]) -> CollectiveStep:
    """Returns a step without empty messages."""
    return CollectiveStep(phase, tuple(message for message in messages if message.span))


def side_by_side(step_lists: Sequence[Sequence[CollectiveStep]]) -> list[CollectiveStep]:
    """Merges step lists of equal length among disjoint ranks into one: first steps together, second steps, ..."""
    return [
        CollectiveStep(together[0].phase, tuple(chain.from_iterable(each.messages for each in together)))
        for together in zip(*step_lists, strict=True)
    ]


def reversed_as_copies(phase: str, steps: Sequence[CollectiveStep]) -> list[CollectiveStep]:
    """Reverses the steps: the same messages from target to source, last step first, as copies of the reduced data."""
    return [
        CollectiveStep(
            phase, tuple(ChunkMessage(each.target, each.source, each.span, "copy") for each in back.messages)
        )
        for back in reversed(steps)
    ]


def check_root(root: int, ranks: int) -> None:
    """Raises ValueError if `root` is not one of the ranks."""
    if not 0 <= root < ranks:
        raise ValueError(f"root {root} is not one of the {ranks} ranks (0 to {ranks - 1})")


def ring_all_reduce(ranks: int, n: int) -> CollectiveProgram:
    """Builds a reduce-scatter and an all-gather: 2(P-1) steps, 2·D·(P-1)/P bytes sent per rank."""
    chunks = chunked(n, ranks)
    steps = reduce_scatter_steps(range(ranks), chunks) + all_gather_steps(range(ranks), chunks)
    return _program("ring all-reduce", ranks, n, chunks, steps)


def ring_reduce_scatter(ranks: int, n: int) -> CollectiveProgram:
    """Builds a reduce-scatter, chunk r to rank r: P-1 steps, D·(P-1)/P bytes. Other chunks stay half reduced."""
    chunks = chunked(n, ranks)
    return _program("ring reduce-scatter", ranks, n, chunks, reduce_scatter_steps(range(ranks), chunks))


def ring_all_gather(ranks: int, n: int) -> CollectiveProgram:
    """Builds an all-gather of chunk r from rank r: P-1 steps, D·(P-1)/P bytes."""
    chunks = chunked(n, ranks)
    return _program("ring all-gather", ranks, n, chunks, all_gather_steps(range(ranks), chunks))


def reduce_scatter_steps(members: Sequence[int], chunks: Sequence[range]) -> list[CollectiveStep]:
    """Returns steps in which chunk c starts at member c+1 and is reduced at every member until it reaches member c."""
    return [_turn("reduce-scatter", members, chunks, turn + 1) for turn in range(len(members) - 1)]


def all_gather_steps(members: Sequence[int], chunks: Sequence[range]) -> list[CollectiveStep]:
    """Returns steps in which chunk c starts at member c and travels round to member c-1."""
    return [_turn("all-gather", members, chunks, turn) for turn in range(len(members) - 1)]


def _turn(phase: str, members: Sequence[int], chunks: Sequence[range], behind: int) -> CollectiveStep:
    """Returns the step in which member i sends chunk i - behind to its right neighbour."""
    count = len(members)
    return step(
        phase,
        (
            ChunkMessage(
                members[i],
                members[(i + 1) % count],
                chunks[(i - behind) % count],
                "reduce" if phase == "reduce-scatter" else "copy",
            )
            for i in range(count)
        ),
    )


def tree_all_reduce(ranks: int, n: int) -> CollectiveProgram:
    """Builds a reduce to rank 0 and a broadcast: 2·ceil(log2 P) steps."""
    steps = _reduce_steps(ranks, n, root=0)
    return _program("tree all-reduce", ranks, n, chunked(n, 1), steps + reversed_as_copies("broadcast", steps))


def tree_reduce(ranks: int, n: int, root: int = 0) -> CollectiveProgram:
    """Builds a reduce to `root`: ceil(log2 P) steps; every other rank sends D once and is left partially reduced."""
    return _program("tree reduce", ranks, n, chunked(n, 1), _reduce_steps(ranks, n, root))


def tree_broadcast(ranks: int, n: int, root: int = 0) -> CollectiveProgram:
    """Builds a broadcast from `root`: the reduction run backwards, ceil(log2 P) steps.

    In each step every rank that has the tensor sends all of it to one that does not.
    """
    return _program(
        "tree broadcast", ranks, n, chunked(n, 1), reversed_as_copies("broadcast", _reduce_steps(ranks, n, root))
    )


def _reduce_steps(ranks: int, n: int, root: int) -> list[CollectiveStep]:
    """Returns the steps, ranks counted from the root: in step k, rank r with lowest set bit k sends to r - 2^k."""
    check_root(root, ranks)
    whole = range(n)
    return [
        step(
            "reduce",
            (
                ChunkMessage((root + place) % ranks, (root + place - distance) % ranks, whole, "reduce")
                for place in range(distance, ranks, 2 * distance)
            ),
        )
        for distance in (1 << k for k in range((ranks - 1).bit_length()))
    ]


def halving_all_reduce(ranks: int, n: int) -> CollectiveProgram:
    """Builds a halving reduce-scatter, then a doubling all-gather: 2·log2 P steps, 2·D·(P-1)/P bytes, P a power of two.

    The ranks above the largest power of two Q first fold into ranks 0 ... P-Q-1 and get the result at the end: two more
    steps of D each.
    """
    power = 1 << (ranks.bit_length() - 1) if ranks > 0 else 0
    chunks = chunked(n, power)
    extra = range(power, ranks)
    fold = [step("fold", (ChunkMessage(rank, rank - power, range(n), "reduce") for rank in extra))] if extra else []
    halving = [_exchange(power, chunks, k) for k in range(power.bit_length() - 1)]
    back = reversed_as_copies("doubling all-gather", halving) + reversed_as_copies("unfold", fold)
    return _program("halving-doubling all-reduce", ranks, n, chunks, fold + halving + back)


def _exchange(power: int, chunks: tuple[range, ...], k: int) -> CollectiveStep:
    """Builds one exchange: ranks 2^k apart hold the same window of chunks; each keeps the half selected by its bit k.

    The nearest ranks exchange the longest messages.
    """
    messages = []
    for rank in range(power):
        start, length = 0, power
        for bit in range(k + 1):
            length //= 2
            # The bits below k chose this rank's window; in the last round, the half that its partner keeps.
            owner = rank if bit < k else rank ^ (1 << k)
            start += length * (owner >> bit & 1)
        messages.append(ChunkMessage(rank, rank ^ (1 << k), joined(chunks[start : start + length]), "reduce"))
    return step("halving reduce-scatter", messages)


def hierarchical_all_reduce(ranks: int, n: int, group: int) -> CollectiveProgram:
    """Builds a ring reduce-scatter per group, rings across groups over each shard, and a ring all-gather per group.

    The groups are the ranks 0 ... group-1, group ... 2·group-1 and so on. 2(group-1) + 2(P/group-1) steps. A rank sends
    2·D·(P-1)/P bytes as in one ring, but only 2·(D/group)·(G-1)/G of them leave its group, with G = P/group.

    Raises ValueError if the number of ranks is not a multiple of `group`.
    """
    if group < 1 or ranks % group:
        divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
        raise ValueError(f"{ranks} ranks do not divide into groups of {group}; possible sizes: {divisors}")
    groups = ranks // group
    chunks = chunked(n, ranks)
    pieces = [chunks[place * groups : (place + 1) * groups] for place in range(group)]
    shards = [joined(piece) for piece in pieces]
    inside = [range(first, first + group) for first in range(0, ranks, group)]
    between = [range(place, ranks, group) for place in range(group)]
    steps = [
        *_named("inside", side_by_side([reduce_scatter_steps(members, shards) for members in inside])),
        *_named(
            "between",
            side_by_side(
                [
                    reduce_scatter_steps(members, piece) + all_gather_steps(members, piece)
                    for members, piece in zip(between, pieces, strict=True)
                ]
            ),
        ),
        *_named("inside", side_by_side([all_gather_steps(members, shards) for members in inside])),
    ]
    return _program(f"hierarchical all-reduce, groups of {group}", ranks, n, chunks, steps)


def _named(where: str, steps: list[CollectiveStep]) -> list[CollectiveStep]:
    return [CollectiveStep(f"{each.phase} {where}", each.messages) for each in steps]


def naive_all_reduce(ranks: int, n: int) -> CollectiveProgram:
    """Builds an all-reduce through rank 0: 2(P-1) steps of D each; rank 0's traffic is 2·D·(P-1)."""
    check_root(0, ranks)
    inward = [step("to rank 0", [ChunkMessage(rank, 0, range(n), "reduce")]) for rank in range(1, ranks)]
    outward = [step("from rank 0", [ChunkMessage(0, rank, range(n), "copy")]) for rank in range(1, ranks)]
    return _program("naive all-reduce", ranks, n, chunked(n, 1), inward + outward)


def scatter(ranks: int, n: int, root: int = 0) -> CollectiveProgram:
    """Builds a scatter, which puts chunk r of `root` on rank r: P-1 steps; the root sends D less its own chunk."""
    check_root(root, ranks)
    chunks = chunked(n, ranks)
    steps = [
        step("scatter", [ChunkMessage(root, rank, chunks[rank], "copy")])
        for rank in ((root + place) % ranks for place in range(1, ranks))
    ]
    return _program("scatter", ranks, n, chunks, steps)


def gather(ranks: int, n: int, root: int = 0) -> CollectiveProgram:
    """Builds a gather, which puts chunk r of rank r on `root`: the scatter run backwards."""
    outward = scatter(ranks, n, root)
    inward = reversed_as_copies("gather", outward.steps)
    return CollectiveProgram("gather", ranks, outward.sizes, outward.chunks, tuple(inward))


def pairwise_all_to_all(ranks: int, n: int) -> CollectiveProgram:
    """Builds an all-to-all, which puts chunk j of rank r on rank j as part r: P-1 pairwise steps, D·(P-1)/P bytes.

    The buffer of rank r holds the `n` elements of its input and then its result: P parts as long as chunk r. The part
    that a rank gets from itself is in place from the start.
    """
    chunks = chunked(n, ranks)
    steps = [
        step(
            "pairwise exchange",
            (
                ChunkMessage(rank, to, chunks[to], "copy", shift=n + rank * len(chunks[to]) - chunks[to].start)
                for rank, to in ((rank, (rank + distance) % ranks) for rank in range(ranks))
            ),
        )
        for distance in range(1, ranks)
    ]
    return CollectiveProgram(
        "pairwise all-to-all", ranks, tuple(n + ranks * len(chunk) for chunk in chunks), chunks, tuple(steps)
    )


THAKUR = "Thakur, Rabenseifner & Gropp 2005"
MOST_RANKS = 512
"""The limit on ranks: a program lists every message, and a ring has one per rank and step, quadratic in the ranks."""


@dataclass(frozen=True)
class AlgorithmEntry:
    """One algorithm of a collective."""

    build: Callable[..., CollectiveProgram]
    """Builds the program from ranks, elements, and the setting that `takes` names."""
    steps: str
    """The number of steps as a closed form in the P ranks."""
    source: str
    takes: Literal["", "root", "group"] = ""
    """The additional setting: the root's rank, or the number of ranks in a group with fast links."""


ALGORITHMS: dict[str, AlgorithmEntry] = {
    "naive-all-reduce": AlgorithmEntry(naive_all_reduce, "2(P-1)", "everything through rank 0"),
    "ring-all-reduce": AlgorithmEntry(ring_all_reduce, "2(P-1)", "Patarasuk & Yuan 2009"),
    "tree-all-reduce": AlgorithmEntry(tree_all_reduce, "2 ceil(log2 P)", THAKUR),
    "halving-doubling-all-reduce": AlgorithmEntry(
        halving_all_reduce, "2 log2 P, P a power of 2", f"Rabenseifner; {THAKUR}"
    ),
    "hierarchical-all-reduce": AlgorithmEntry(
        hierarchical_all_reduce, "2(g-1) + 2(P/g-1), groups of g", "Mikami et al. 2018", takes="group"
    ),
    "ring-reduce-scatter": AlgorithmEntry(ring_reduce_scatter, "P-1", "Patarasuk & Yuan 2009"),
    "ring-all-gather": AlgorithmEntry(ring_all_gather, "P-1", "Patarasuk & Yuan 2009"),
    "tree-broadcast": AlgorithmEntry(tree_broadcast, "ceil(log2 P)", THAKUR, takes="root"),
    "tree-reduce": AlgorithmEntry(tree_reduce, "ceil(log2 P)", THAKUR, takes="root"),
    "scatter": AlgorithmEntry(scatter, "P-1", "straight from the root", takes="root"),
    "gather": AlgorithmEntry(gather, "P-1", "straight to the root", takes="root"),
    "all-to-all": AlgorithmEntry(pairwise_all_to_all, "P-1", "pairwise exchange"),
}


def full_name(name: str) -> str:
    """Returns the catalogue's spelling of an algorithm's name. Raises JobError with the nearest one if it has none."""
    spelled = name.lower().replace("_", "-").replace(" ", "-")
    if spelled not in ALGORITHMS:
        meant = nearest(spelled, ALGORITHMS) or next((known for known in ALGORITHMS if spelled in known), None)
        hint = f"; did you mean {meant}?" if meant else ""
        raise JobError(f"no collective algorithm {name!r}{hint} (known: {', '.join(ALGORITHMS)})")
    return spelled


def build(name: str, ranks: int, elements: int, **settings: int) -> CollectiveProgram:
    """Returns the program of the algorithm `name` among `ranks` ranks for a tensor of `elements` elements.

    `settings` may have the `root` or `group` that the algorithm takes; by default the root is rank 0, and a group is
    the largest proper divisor of the ranks. Raises JobError with the nearest name, or where a setting does not fit.
    """
    spelled = full_name(name)
    if ranks > MOST_RANKS:
        raise JobError(f"ranks {ranks}: at most {MOST_RANKS}, because a program lists every message")
    entry = ALGORITHMS[spelled]
    if wrong := [setting for setting in settings if setting != entry.takes]:
        raise JobError([f"{spelled} has no {setting}; leave --{setting} out" for setting in wrong])
    if entry.takes == "group":
        settings.setdefault("group", next(size for size in range(max(1, ranks // 2), 0, -1) if ranks % size == 0))
    try:
        return entry.build(ranks, elements, **settings)
    except ValueError as error:
        raise JobError(f"{spelled}: {error}") from None


ROWS, COLUMNS = 32, 12
"""Maximum numbers of steps and ranks shown."""


def table(program: CollectiveProgram) -> Iterator[str]:
    """Yields the lines of the steps: `3⇒1` is chunk 3 to rank 1, combined with its own; `3→1` overwrites."""
    shown = program.steps[:ROWS]
    ranks = range(min(program.ranks, COLUMNS))
    heads = ["step", "phase", *(f"rank {rank}" for rank in ranks)]
    rows = [heads, *([str(number), *_row_cells(step, program, ranks)] for number, step in enumerate(shown, 1))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    for row in rows:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
    left_out = [
        f"{total - most} of {total} {what}"
        for total, most, what in ((len(program.steps), ROWS, "steps"), (program.ranks, COLUMNS, "ranks"))
        if total > most
    ]
    if left_out:
        yield f"not shown: {', '.join(left_out)}; --svg and --json have them all"
    yield "3⇒1: chunk 3 to rank 1, combined with its own; 3→1: overwrites it"


def counts(program: CollectiveProgram, element_bytes: int) -> Iterator[str]:
    """Yields the lines of the traffic, with elements of `element_bytes` bytes."""
    yield f"steps: {len(program.steps)}"
    yield f"messages sent per rank: {_by_rank(program.messages_sent(), str)}"
    yield f"bytes sent per rank: {_by_rank([n * element_bytes for n in program.elements_sent()], gib)}"
    yield f"bytes on the critical path: {gib(program.critical_elements() * element_bytes)}"


def _row_cells(step: CollectiveStep, program: CollectiveProgram, ranks: range) -> list[str]:
    sent = {message.source: message for message in step.messages}
    return [step.phase, *(_cell(sent[rank], program) if rank in sent else "" for rank in ranks)]


def _cell(message: ChunkMessage, program: CollectiveProgram) -> str:
    carried = chunks_of(message, program)
    if len(program.chunks) == 1:
        name = "all"
    else:
        name = f"{carried[0]}" if len(carried) == 1 else f"{carried[0]}-{carried[-1]}"
    return f"{name}{'⇒' if message.action == 'reduce' else '→'}{message.target}"


def _by_rank(numbers: Sequence[int], shown: Callable[[int], str]) -> str:
    """Returns one figure if it is the same for all ranks, all figures of few ranks, and otherwise the range."""
    if len(set(numbers)) == 1:
        return shown(numbers[0])
    if len(numbers) <= COLUMNS:
        return ", ".join(map(shown, numbers))
    return f"{shown(min(numbers))} to {shown(max(numbers))}"


_CELL = 14  # pixels
_MARGIN_LEFT = 176
_MARGIN = 24
_TOP = 62
_BAND = 84  # height of a step: the chunks that are sent, then the arrows


def svg(program: CollectiveProgram) -> str:
    """Returns the picture of `program` as an SVG document.

    The chunks that an arrow carries stand above it, in their colours; a solid arrow is combined with the receiver's
    data, a dashed one overwrites it. Chunks without elements are not shown: draw a program of at least as many elements
    as chunks.
    """
    widest = max((len(chunks_of(message, program)) for message in program.messages), default=1)
    spacing = max(72, widest * _CELL + 20)
    width = _MARGIN_LEFT + program.ranks * spacing + _MARGIN
    height = _TOP + len(program.steps) * _BAND + 2 * _MARGIN
    columns = [_MARGIN_LEFT + rank * spacing + spacing / 2 for rank in range(program.ranks)]
    parts = [
        heading(_MARGIN, 24, _title(program)),
        *(_rank(rank, x, height - 2 * _MARGIN) for rank, x in enumerate(columns)),
    ]
    for index, step in enumerate(program.steps):
        top = _TOP + index * _BAND
        parts.append(text(_MARGIN, top + 12, f"step {index + 1}", "font-weight='600'"))
        parts.append(text(_MARGIN, top + 28, step.phase))
        parts.extend(_message(message, program, columns, top) for message in step.messages)
    words = "solid: combined with the receiver's own   dashed: copied"
    parts.append(text(_MARGIN, height - 18, words, "xml:space='preserve'"))
    return document(_title(program), width, height, parts)


def _title(program: CollectiveProgram) -> str:
    return f"{program.name} on {program.ranks} ranks: {len(program.steps)} steps"


def _rank(rank: int, x: float, bottom: float) -> str:
    line = f"<line x1='{x:g}' y1='{_TOP - 6}' x2='{x:g}' y2='{bottom:g}' stroke='{NEUTRAL}' stroke-opacity='0.35'/>"
    return f"<text x='{x:g}' y='{_TOP - 12}' text-anchor='middle'>rank {rank}</text>" + line


def _message(message: ChunkMessage, program: CollectiveProgram, columns: list[float], top: float) -> str:
    """Returns the chunks above the source, and the arrow from there to the target at the end of the step."""
    carried = chunks_of(message, program)
    colour = COLOURS[carried[0] % len(COLOURS)] if len(carried) == 1 else NEUTRAL
    cells = _cells(carried, program, columns[message.source], top)
    return f"<g class='message'>{cells}{_arrow(message, columns, top, colour)}</g>"


def _cells(carried: list[int], program: CollectiveProgram, centre: float, top: float) -> str:
    """Returns one numbered square per chunk; a wider one labelled `all` if the algorithm does not divide the tensor."""
    size = 2 * _CELL if len(program.chunks) == 1 else _CELL
    left = centre - size * len(carried) / 2
    cells = []
    for place, chunk in enumerate(carried):
        x = left + place * size
        label = "all" if len(program.chunks) == 1 else str(chunk)
        cells.append(
            f"<rect x='{x:g}' y='{top}' width='{size}' height='{_CELL}' fill='{COLOURS[chunk % len(COLOURS)]}'/>"
            f"<text x='{x + size / 2:g}' y='{top + 11}' text-anchor='middle' font-size='10' fill='#fff'>{label}</text>"
        )
    return "".join(cells)


def _arrow(message: ChunkMessage, columns: list[float], top: float, colour: str) -> str:
    """Returns a line to just above the next step, and its head."""
    x1, y1 = columns[message.source], top + _CELL
    x2, y2 = columns[message.target], top + _BAND - 6
    length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
    ux, uy = (x2 - x1) / length, (y2 - y1) / length
    back, side = 9, 4
    base_x, base_y = x2 - back * ux, y2 - back * uy
    corners = ((x2, y2), (base_x - side * uy, base_y + side * ux), (base_x + side * uy, base_y - side * ux))
    head = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    dashes = " stroke-dasharray='5 4'" if message.action == "copy" else ""
    return (
        f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{base_x:.1f}' y2='{base_y:.1f}' stroke='{colour}' "
        f"stroke-width='2'{dashes}/>"
        f"<polygon points='{head}' fill='{colour}'/>"
    )
