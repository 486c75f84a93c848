"""Text by tensor and pipeline ranks, which hold parts of a model each, against text by one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from generate.texts import alone, by_engine
from generate.written import write_run
from model.kinds import ATTENTION_KINDS, KINDS, MOE_AND_MLA, STRUCTURE_KINDS, tokens
from phalanx.comm.agree import broadcast_json
from phalanx.errors import JobError
from phalanx.generate.decoder import STOP, Decoder, follow
from phalanx.generate.engine import Engine
from phalanx.generate.load import load_run
from phalanx.generate.ranks import load_part

ALL = {**KINDS, **MOE_AND_MLA, **ATTENTION_KINDS, **STRUCTURE_KINDS}
GREEDY = {"max_new_tokens": 9, "temperature": 0}
SAMPLED = {"max_new_tokens": 4, "temperature": 1.5, "top_k": 20, "top_p": 0.9, "seed": 7}


def texts(
    ranks: Any,
    run: Path,
    prompts: list[list[int]],
    tp: int,
    pp: int,
    each: Sequence[dict] = (SAMPLED,),
    assistant: Path | None = None,
) -> tuple[list[str], int, list[list[list[int]]]]:
    """This rank's parameters, the heads in its cache, and on the first rank the texts with each of the options."""
    part = load_part(run, 0, torch.device("cpu"), tp, pp)
    found = []
    if ranks.rank:
        follow(part)
    else:
        leader = replace(part, leads=True)
        other = load_run(assistant).decoder if assistant else None
        try:
            leader.prefill("heads", [1], 1, last=True)
            found = [by_engine(Engine(leader, other), prompts, **options) for options in each]
        finally:
            broadcast_json(STOP)
    heads = {keys.shape[1] for cache in part.batches.values() for keys, _ in cache._layers.values()} or {0}
    return [name for name, _ in part.model.named_parameters()], max(heads), found


def expected(model: Any, prompts: list[list[int]], options: dict = SAMPLED) -> list[list[int]]:
    return alone(Decoder.whole(model), prompts, **options)


@pytest.mark.parametrize(
    ("kind", "tp", "pp"),
    [
        *(("gpt2", 1, 3), ("gpt2 untied", 1, 2), ("llama", 2, 2), ("qwen 2", 2, 1)),
        *((name, 2, 1) for name in (*MOE_AND_MLA, *ATTENTION_KINDS, *STRUCTURE_KINDS)),
    ],
)
def test_ranks_generate_the_texts_of_one_process(ranks, tmp_path, kind: str, tp: int, pp: int):
    model = replace(ALL[kind], n_layers=3) if pp > 1 else ALL[kind]
    """The second text ends beyond the context length of 12."""
    whole = write_run(tmp_path, model)
    prompts = [tokens(model, 1, length, seed=length)[0].tolist() for length in (2, 10)]
    (_, _, found), *others = ranks(texts, tp * pp, tmp_path, prompts, tp, pp)
    assert found == [expected(whole, prompts)]
    assert not any(texts for _, _, texts in others)


def test_tensor_ranks_cut_the_cache_and_take_an_assistant(ranks, tmp_path):
    model = KINDS["llama"]
    whole = write_run(tmp_path / "run", model)
    write_run(tmp_path / "small", replace(KINDS["gpt2"], n_layers=1))
    prompts = [[1, 2, 3], [4]]
    (_, heads, found), *_ = ranks(texts, 2, tmp_path / "run", prompts, 2, 1, (GREEDY, SAMPLED), tmp_path / "small")
    assert found[0] == expected(whole, prompts, GREEDY)
    assert [len(text) for text in found[1]] == [7, 5]
    assert heads == model.kv_heads // 2


def test_each_pipeline_rank_holds_its_own_layers_alone(ranks, tmp_path):
    whole = write_run(tmp_path, replace(KINDS["gpt2"], n_layers=3))
    held = [names for names, _, _ in ranks(texts, 3, tmp_path, [[1]], 1, 3)]
    tied = {"embed.weight"}
    assert set(held[0]) & set(held[2]) == tied
    assert not set(held[1]) & set(held[0] + held[2])
    assert set().union(*held) == {name for name, _ in whole.named_parameters()}
    assert all({name.split(".")[1] for name in held[rank] if "blocks" in name} == {str(rank)} for rank in range(3))


def test_ranks_that_cannot_share_the_model_are_refused(ranks, tmp_path):
    write_run(tmp_path, KINDS["gpt2"])
    with pytest.raises(JobError, match=r"1 ≤ pp 3 ≤ n_layers 2 does not hold(?s:.*)n_heads 4 / tp 3"):
        ranks(texts, 3, tmp_path, [[1]], 3, 3)
