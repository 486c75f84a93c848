"""What is added through phalanx.extend and states too little, or contradicts itself, is refused with every problem."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phalanx import extend, facts
from phalanx.config.cluster import Accelerator, Cluster, Link
from phalanx.config.clusters import CLUSTERS, DEVICES, MACHINES, DeviceEntry, MachineEntry, device_reported_as
from phalanx.config.corpora import CORPORA, TOKENIZERS, CorpusEntry, TokenizerEntry, vocabulary_of
from phalanx.config.job import Data
from phalanx.data.corpus import segments, sources
from phalanx.data.index import read_index
from phalanx.data.prepare import prepare
from phalanx.data.tokenizer import Tokenizer, definition_of
from phalanx.errors import DataError, ExtensionError
from phalanx.schedule.catalogue import SCHEDULES, likely, problems
from phalanx.validation.row import read as read_row

DEVICE = Accelerator(name="mine", bf16_tflops=1, fp32_tflops=1, memory_gib=1, bandwidth_gbs=1)
LINK = Link(gbs=10, latency_us=5)
NODE = Cluster(devices_per_node=2, accelerator=DEVICE, intra=LINK, inter=LINK)
ONE_F_ONE_B = replace(SCHEDULES["1f1b"], also_called=())


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    for table in extend.TABLES.values():
        for name in list(table._packages):
            table.remove(name)


def refused(kind: str, name: str, entry: object) -> list[str]:
    """Returns the problems for which phalanx.extend refuses an entry."""
    with pytest.raises(ExtensionError) as caught:
        getattr(extend, kind)(name, entry)
    assert name not in extend.TABLES[kind] or extend.TABLES[kind].package(name) == "phalanx"
    return [problem.removeprefix(f"{kind} {name!r}: ") for problem in caught.value.problems]


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, table in extend.TABLES.items() for name in table])
def test_the_projects_own_entries_state_all_facts(kind: str, name: str):
    table = extend.TABLES[kind]
    assert table.package(name) == "phalanx"
    assert list(facts.problems(table[name])) == []
    unique = [problem for problem in table.problems(name, table[name]) if "already means" not in problem]
    assert unique == ["the name is taken by package phalanx"]


def test_every_table_has_its_function():
    assert all(callable(getattr(extend, kind)) for kind in extend.TABLES)


@pytest.mark.parametrize(
    ("entry", "missing"),
    [
        (extend.ScheduleEntry, "build, title, source, in_flight, idle, searched"),
        (extend.DeviceEntry, "accelerator, source"),
        (extend.MachineEntry, "cluster, source"),
        (extend.CorpusEntry, "title, source"),
        (extend.TokenizerEntry, "title, source, make, read"),
    ],
)
def test_an_object_without_facts_names_all_that_it_needs(entry: type, missing: str):
    with pytest.raises(ExtensionError, match=f"{entry.__name__} states too little; missing: {missing}$"):
        entry()


def test_a_schedule_is_compared_with_its_programs_and_its_names_with_the_others():
    wrong = replace(ONE_F_ONE_B, in_flight=lambda p, m, v, r: 0, interleaves="nothing", also_called=("vpp",))
    found = refused("schedule", "mine", replace(wrong, chunks=(1, 2)))
    assert "'vpp' already means interleaved_1f1b" in found
    assert "interleaves 'nothing' is no schedule with one stage per rank" in found
    assert refused("schedule", "1-f1b", replace(ONE_F_ONE_B))[0] == "'1f1b' already means 1f1b"
    assert "its name is '1f1b', not 'mine'" in refused("schedule", "mine", ONE_F_ONE_B)[0]
    assert refused("schedule", "mine", replace(ONE_F_ONE_B, in_flight=len, searched=1)) == [
        "in_flight must take 4 arguments",
        "searched must be True or False, is 1",
    ]


def test_a_schedule_is_found_by_its_other_names_and_refuses_what_it_says():
    entry = replace(
        ONE_F_ONE_B,
        build=lambda p, m: replace(ONE_F_ONE_B.build(p, m), name="mine"),
        also_called=("thebest",),
        refuses=lambda p, m, v: f"{m} micro-batches are odd; nearest legal: {m + 1}" if m % 2 and m > 1 else "",
    )
    extend.schedule("mine", entry)
    assert likely("the_best") == "mine"
    assert problems("mine", 2, 4) == []
    assert problems("mine", 2, 5) == ["mine: 5 micro-batches are odd; nearest legal: 6"]
    assert problems("mien", 2, 4)[0].startswith("no schedule 'mien'; did you mean mine?")


def test_a_device_states_its_rates_and_a_name_of_its_own():
    assert refused("device", "mine", DeviceEntry(Accelerator(), "me")) == [
        "accelerator.name is '', not 'mine'",
        "accelerator.fp32_tflops is missing",
        "accelerator.memory_gib is missing",
        "accelerator.bandwidth_gbs is missing",
        "accelerator.bf16_tflops or fp16_tflops is missing",
    ]
    h100 = replace(DEVICE, memory_gib=80.0)
    assert refused("device", "mine", DeviceEntry(h100, "me", ("H100 80GB HBM3", " "))) == [
        "reported_as 'H100 80GB HBM3' with 80 GiB already means h100-80gb",
        "reported_as ' ' names no device",
    ]
    assert refused("device", "mine", DeviceEntry(replace(DEVICE, ceiling=2, cores=0), "")) == [
        "accelerator.ceiling must be above 0 and at most 1, is 2",
        "accelerator.cores must be at least 1, is 0",
        "source must not be empty",
    ]
    extend.device("mine", DeviceEntry(DEVICE, "me", ("My Device",)))
    assert device_reported_as("NVIDIA my-device", 1.05) is DEVICE
    assert device_reported_as("NVIDIA my-device", 2.0) is None


def test_a_cluster_states_its_device_and_both_links_of_one_node():
    assert refused("cluster", "mine", MachineEntry(Cluster(), "me")) == [
        "cluster.accelerator.name is missing",
        "cluster.accelerator.fp32_tflops is missing",
        "cluster.accelerator.memory_gib is missing",
        "cluster.accelerator.bandwidth_gbs is missing",
        "cluster.accelerator.bf16_tflops or fp16_tflops is missing",
        "cluster.devices_per_node is missing",
        "cluster.inter.gbs is missing",
        "cluster.inter.latency_us is missing",
    ]
    assert refused("cluster", "mine", MachineEntry(replace(NODE, nodes=3, preset="x", intra=Link()), "me")) == [
        "cluster.intra.gbs is missing",
        "cluster.intra.latency_us is missing",
        "cluster.preset is not a machine's own: leave it out",
        "cluster.nodes is not a machine's own: leave it out",
    ]
    assert "the name stands for the machine" in refused("cluster", "local", MachineEntry(NODE, "me"))[0]
    extend.cluster("mine", MachineEntry(NODE, "me"))
    assert CLUSTERS["mine"] == replace(NODE, preset="mine")
    # A table of measurements names it, or its device.
    measured = {"model_name": "llama3-8b", "n_gpus": "4", "dp": "4", "global_batch_seqs": "8", "step_time_s": "1.5"}
    for gpu in ("Mine", "mine"):
        assert read_row({**measured, "gpu": gpu}).spec.cluster.accelerator == DEVICE
    MACHINES.remove("mine")
    assert "mine" not in CLUSTERS
    extend.cluster("mine", MachineEntry(replace(NODE, devices_per_node=1, intra=Link()), "me"))


def texts(files: object, data: object) -> list[list[str]]:
    return [["a"]]


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"documents": CorpusEntry.documents}, ["states too little; missing: files, documents, rows, or tokens"]),
        (
            {"documents": "nowhere", "settings": ["path"]},
            ["documents must be a function, or its place", "settings must be a tuple of text, is ['path']"],
        ),
        (
            {"settings": ("pth",), "only_location": ("path",)},
            ["data has no field 'pth'", "only_location path is not among settings"],
        ),
        ({"vocab": 5}, ["vocab is for a corpus of tokens; the tokenizer states a text's"]),
        (
            {"tokens": texts, "count": "cuont"},
            [
                "data has no field 'cuont'",
                "tokens stand instead of a text: leave out files and documents",
                "vocab is missing: a corpus of tokens states it",
            ],
        ),
        ({"also_called": ("tinyshakespeare",)}, ["'tinyshakespeare' already means shakespeare_char"]),
        ({"rules": lambda data: 1 / 0}, ["rules failed for the default data: ZeroDivisionError"]),
        ({"rules": lambda data: ["wrong"]}, ["rules must yield pairs of a field's path and a message"]),
    ],
)
def test_a_corpus_states_its_text_or_its_tokens(changed: dict[str, object], found: list[str]):
    entry = replace(CorpusEntry("mine", "me", documents=texts), **changed)
    for problem, start in zip(refused("corpus", "mine", entry), found, strict=True):
        assert problem.startswith(start)


def test_a_tokenizer_states_settings_that_exist():
    entry = TokenizerEntry("mine", "me", make=texts, read=None, vocab="bpe_vocb", settings=("pth",))
    found = refused("tokenizer", "mine", entry)
    assert [problem.partition(" (")[0] for problem in found] == [
        "data has no field 'pth'",
        "data has no field 'bpe_vocb'",
    ]
    assert refused("tokenizer", "number", replace(entry, vocab=-1, settings=())) == [
        "vocab must not be negative, is -1",
        "the name stands for tokens without text",
    ]
    assert refused("tokenizer", "char", replace(entry, vocab=1, settings=())) == [
        "the name is taken by package phalanx"
    ]


def test_the_tables_are_those_that_the_rooms_use():
    assert extend.TABLES["device"] is DEVICES
    assert extend.TABLES["corpus"] is CORPORA
    assert extend.TABLES["tokenizer"] is TOKENIZERS


def test_what_the_code_of_a_corpus_returns_is_checked(tmp_path: Path):
    data = Data(corpus="mine", dir=str(tmp_path))
    extend.corpus("mine", CorpusEntry("mine", "me", files=lambda data: ["a"], documents=lambda files, data: [[1]]))
    with pytest.raises(ExtensionError, match="corpus 'mine' of this process: files returned list, not a list of paths"):
        sources(data)
    with pytest.raises(ExtensionError, match="corpus 'mine' of this process: documents yielded a part of type int"):
        list(segments([], data))


def test_what_the_code_of_a_tokenizer_returns_is_checked(tmp_path: Path):
    file = tmp_path / "tokenizer.json"
    file.write_text(definition_of("mine"))
    read_by = {"broken": lambda stored: stored["nothing"], "wrong": lambda stored: 5}
    for name, read in read_by.items():
        extend.tokenizer(name, TokenizerEntry(name, "me", make=lambda data, counts, texts: 5, read=read))
        file.write_text(definition_of(name))
        with pytest.raises((DataError, ExtensionError), match=f"tokenizer '{name}' of this process.*(KeyError|int)"):
            Tokenizer.load(tmp_path)
    (text := tmp_path / "text.txt").write_text("some text")
    with pytest.raises(ExtensionError, match="tokenizer 'wrong' of this process: make returned int"):
        prepare(Data(corpus="text", path=str(text), tokenizer="wrong", dir=str(tmp_path)))


def test_tokens_without_text_are_checked(tmp_path: Path):
    def tokens(data: Data, split: str, start: int, size: int) -> np.ndarray:
        return np.arange(start, start + size) % 7

    extend.corpus("mod7", CorpusEntry("mod 7", "me", tokens=tokens, count=100, vocab=7))
    extend.corpus("mod9", CorpusEntry("mod 9", "me", tokens=tokens, count=100, vocab=5))
    index = read_index(prepare(Data(corpus="mod7", dir=str(tmp_path))))
    assert (index.vocab_size, index.tokens("train"), index.tokens("val")) == (7, 90, 10)
    assert vocabulary_of(Data(corpus="mod7")) == 7
    with pytest.raises(DataError, match="corpus mod9 gave ids from 0 to 6; its vocabulary has 5: 0 to 4"):
        prepare(Data(corpus="mod9", dir=str(tmp_path)))
