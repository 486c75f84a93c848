"""Silent bugs that others found where parallelisms compose, each as a layout of ours that equals one process.

Megatron-LM 7452 lists eleven. Its findings 4 and 9 are NOT_FOUND: their texts were not to be had. Some are of parts
that are not trained here (cross-attention, images): then the part of ours that could have the same mistake stands for
them."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from covering import also_whole
from phalanx.api import load_job
from phalanx.verify.measure import TOLERANCE, compare, record
from phalanx.verify.run import first_difference
from phalanx.verify.select import select
from verify.bugs import MODELS

CHATS = "data.corpus=chat data.path=chats.jsonl data.packing=true data.document_mask=true"


class Finding(NamedTuple):
    """A bug of another framework."""

    source: str
    what: str
    model: str
    layouts: tuple[str, ...]
    job: str = ""


FINDINGS = (
    Finding(
        "Megatron-LM 7452.1",
        "Label smoothing was over each tensor rank's part of the vocabulary.",
        "llama",
        ("tp=2,cp=2", "tp=2,loss_chunk=24,accumulation=2", *also_whole("tp=2,tiles=2,tile=head,dp_shard=2", "tp=2")),
        "train.label_smoothing=0.1",
    ),
    Finding(
        "Megatron-LM 7452.2",
        "Gathered logits went into a loss that takes them for a part of the vocabulary, which adds log(tp).",
        "llama",
        ("tp=4", *also_whole("tp=2,loss_chunk=24,accumulation=2")),
    ),
    Finding(
        "Megatron-LM 7452.3",
        "A loss beside the main one (of multi-token prediction) was divided by each rank's own tokens; here with "
        "padding that differs from rank to rank, and documents over the borders of context-parallel ranks.",
        "further tokens",
        (
            "cp=2",
            "dp_shard=2,pp=2,zero=3",
            *also_whole("tp=2,sp=true,pp=2,accumulation=4", "dp_replicate=2,dp_shard=2,zero=1"),
        ),
        CHATS,
    ),
    Finding(
        "Megatron-LM 7452.5",
        "The routers' padding mask was cut over another group of ranks than the tokens that it is for.",
        "experts",
        ("dp_replicate=2,tp=2,sp=true", *also_whole("tp=2,sp=true,pp=2,accumulation=4")),
        CHATS,
    ),
    Finding(
        "Megatron-LM 7452.6",
        "Queries, keys and values of cross-attention gathered their tokens for sequence parallelism over another group "
        "than the module's own, which mixed replicas; ours are those of self-attention.",
        "llama",
        ("dp_replicate=2,tp=2,sp=true",),
    ),
    Finding(
        "Megatron-LM 7452.7",
        "Embeddings were scattered for sequence parallelism over another group than the layers'.",
        "gpt",
        ("dp_replicate=2,tp=2,sp=true,accumulation=2",),
    ),
    Finding(
        "Megatron-LM 7452.8",
        "The norm of the gradients counted attention sinks, which tensor ranks cut, as if each had them all.",
        "llama",
        ("dp_shard=2,tp=2,zero=1", *also_whole("tp=2")),
        "model.sinks=true",
    ),
    Finding(
        "Megatron-LM 7452.10",
        "Summing the routers' counts in place overwrote those of this rank, so that a penalty's gradient doubled.",
        "experts",
        ("tp=2,sp=true", "cp=2,tp=2"),
        CHATS,
    ),
    Finding(
        "Megatron-LM 7452.11",
        "The gradient of a norm of heads (of a delta net), whole on every tensor rank, was summed with sequence "
        "parallelism alone.",
        "llama",
        ("tp=2", "tp=2,sp=true"),
        "model.qk_norm=head",
    ),
    Finding(
        "torchtitan 3280 and 3329",
        "With tensor and context parallelism together the loss shown was not summed over the context-parallel ranks.",
        "experts",
        ("tp=2,cp=2",),
    ),
    Finding(
        "torchtitan 4054",
        "With tensor parallelism and no expert parallelism gradients below the experts were not summed.",
        "experts",
        ("tp=2", *also_whole("tp=2,sp=true")),
    ),
    Finding(
        "torchtitan 4245",
        "With tensor parallelism and no expert parallelism every rank added the whole bias of the experts' output "
        "before the sum, which multiplied it by tp.",
        "experts",
        ("tp=2", "tp=2,sp=true"),
        "model.bias=true",
    ),
    Finding(
        "Megatron-LM 6660",
        "With one rank for each expert, FSDP doubled the experts' gradients in every micro-batch.",
        "experts",
        ("dp_shard=2,ep=2,zero=3,accumulation=4",),
    ),
    Finding(
        "Megatron-LM 5916",
        "The norm of the gradients left out experts under expert and tensor parallelism.",
        "experts",
        ("dp_shard=2,tp=2,ep=2,zero=1",),
    ),
    Finding(
        "Megatron-LM 7227",
        "FSDP counted a tied embedding on both ends of a pipeline in the norm.",
        "gpt",
        ("dp_shard=2,pp=2,zero=3,accumulation=2",),
    ),
    Finding(
        "torchtitan 2318",
        "Norms differed between replicas (DDP, HSDP) and shards by the number of ranks.",
        "llama",
        ("dp_replicate=2,dp_shard=2,zero=3", *also_whole("dp_replicate=2")),
    ),
)

NOT_FOUND = ("Megatron-LM 7452.4", "Megatron-LM 7452.9")
"""Findings whose texts were not to be had, so that no layout stands for them."""


def test_every_finding_is_here_or_named_as_not_found():
    ours = {*NOT_FOUND, *(finding.source for finding in FINDINGS)}
    assert {f"Megatron-LM 7452.{number}" for number in range(1, 12)} <= ours
    assert not {*NOT_FOUND} & {finding.source for finding in FINDINGS}


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.source)
def test_it_does_not_hold_here(ranks, tmp_path, finding: Finding):
    selection = select(load_job(*MODELS[finding.model].split(), *finding.job.split()), lines=finding.layouts)
    assert selection.refused == []
    vocab, records = selection.compared.vocab_size, {}
    for layout in selection.layouts:
        alone = selection.alone(layout)
        if alone not in records:
            records[alone] = tmp_path / str(len(records))
            ranks(record, 1, alone, vocab, 2, records[alone])
        found = ranks(compare, layout.processes, selection.case(layout), vocab, 2, records[alone])[0]
        assert first_difference(found, TOLERANCE) is None, f"{layout.line()}: {finding.what}"
        assert len(found.norms) == 2
