"""Names and conversions of weights: every parameter has one counterpart, and every conversion an exact inverse."""

from __future__ import annotations

import pytest
import torch

from families.counterparts import COUNTERPARTS, small_model
from phalanx.blocks.parameters import parameter_shapes
from phalanx.config.hugging_face.families import FAMILIES
from phalanx.config.presets import PRESETS
from phalanx.errors import JobError
from phalanx.exchange.hugging_face import WEIGHTS
from phalanx.exchange.links import links, shapes_of_theirs


def test_every_model_type_has_a_table_of_weights():
    assert {family.model_type for family in FAMILIES} == set(WEIGHTS)


@pytest.mark.parametrize("name", COUNTERPARTS)
def test_conversions_are_exact_in_both_directions(name: str):
    family = WEIGHTS[COUNTERPARTS[name].model_type]
    model = small_model(PRESETS[name], COUNTERPARTS[name].small)
    shapes = parameter_shapes(model)
    generator = torch.Generator().manual_seed(0)
    found: list[str] = []
    for link in links(model, family):
        ours = [torch.randint(-9, 9, shapes[each], generator=generator).double() for each in link.ours]
        theirs = link.conversion.theirs(ours, model)
        expected = shapes_of_theirs(link, model, shapes)
        assert [tuple(each.shape) for each in theirs] == [expected[each] for each in link.theirs]
        again = link.conversion.ours(theirs, model)
        assert all(map(torch.equal, again, ours))
        found += link.ours
        assert all(family.name_of(each) == each and family.needs(each, model) for each in link.theirs)
    assert sorted(found) == sorted(shapes)
    names = [name for link in links(model, family) for name in link.theirs]
    assert len({*names}) == len(names)


def test_a_norm_in_bf16_gets_its_one_in_fp32():
    link = next(
        link
        for link in links(PRESETS["gemma2-2b"], WEIGHTS["gemma2"])
        if link.theirs[0] == "model.layers.0.input_layernorm.weight"
    )
    stored = torch.tensor([0.001, -1.5], dtype=torch.bfloat16)
    ours = link.conversion.ours([stored], PRESETS["gemma2-2b"])
    assert ours[0].dtype == torch.float32
    assert torch.equal(link.conversion.theirs(ours, PRESETS["gemma2-2b"])[0].bfloat16(), stored)


@pytest.mark.parametrize(
    ("model_type", "stored", "name"),
    [
        ("gpt2", "h.0.attn.c_attn.weight", "transformer.h.0.attn.c_attn.weight"),
        ("gpt2", "transformer.h.0.ln_1.bias", "transformer.h.0.ln_1.bias"),
        ("llama", "layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("gpt_neox", "lm_head.weight", "embed_out.weight"),
        ("gemma3_text", "language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("gemma3_text", "model.language_model.norm.weight", "model.norm.weight"),
    ],
)
def test_other_spellings_of_names(model_type: str, stored: str, name: str):
    assert WEIGHTS[model_type].name_of(stored) == name


@pytest.mark.parametrize(
    ("preset", "model_type", "name", "needed"),
    [
        ("gpt2", "gpt2", "transformer.h.0.attn.bias", False),
        ("gpt2", "gpt2", "lm_head.weight", False),
        ("gpt2", "gpt2", "transformer.h.0.attn.c_attn.bias", True),
        ("llama3-8b", "llama", "lm_head.weight", True),
        ("llama3-8b", "llama", "model.layers.0.self_attn.rotary_emb.inv_freq", False),
        ("deepseek-v3", "deepseek_v3", "model.layers.61.eh_proj.weight", False),
        ("deepseek-v3", "deepseek_v3", "model.layers.60.eh_proj.weight", True),
    ],
)
def test_tensors_without_use_are_known(preset: str, model_type: str, name: str, needed: bool):
    assert WEIGHTS[model_type].needs(name, PRESETS[preset]) == needed


def test_parameters_without_a_counterpart_are_named():
    with pytest.raises(JobError, match=r"blocks\.0\.attn\.q_norm\.weight"):
        list(links(PRESETS["qwen3-8b"], WEIGHTS["llama"]))
