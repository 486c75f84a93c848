"""Modules for further tokens: the loss and its gradients against plain loops, what they read, and what is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from model.kinds import KINDS, MOE_AND_MLA, build
from phalanx.blocks.parameters import count, parameter_shapes, train_flops_per_token
from phalanx.check.job import problems_of
from phalanx.comm.axis import Axis
from phalanx.config.job import IGNORE, Data, Job
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.config.presets import PRESETS
from phalanx.model.documents import Documents
from phalanx.parallel.objective import FurtherTokens, MicroTensors, Objective
from phalanx.parallel.vocabulary import CrossEntropy
from phalanx.partition.cut import stages_of
from phalanx.partition.derived import even, stage_shapes

LLAMA = replace(KINDS["llama"], n_layers=4, mtp=2)
DEEPSEEK = replace(MOE_AND_MLA["deepseek"], n_layers=3, mtp=1)
WEIGHT = 0.3


def micro_of(model: ModelConfig, documents: Documents | None = None, masked: int = 0) -> MicroTensors:
    rows = torch.randint(model.vocab_size, (2, model.seq_len + 1), generator=torch.Generator().manual_seed(1))
    tokens, targets = rows[:, :-1].contiguous(), rows[:, 1:].clone()
    targets[0, 3 : 3 + masked] = IGNORE
    further = tuple(FurtherTokens.of(tokens, targets, documents, depth + 1) for depth in range(model.mtp))
    return MicroTensors(tokens, targets, documents=documents, further=further)


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def losses_of(model, micro: MicroTensors, documents: list[list[int]] | None = None) -> list[torch.Tensor]:
    """Returns the losses of the main model and of each module, position by position (DeepSeek-V3, equations 21 to 24),
    from the blocks of the model and parameters by name."""
    config, named = model.config, dict(model.named_parameters())
    eps, head = config.norm_eps, named.get("head.weight", named["embed.weight"])
    positions = torch.arange(config.seq_len)
    hidden = model.hidden(micro.tokens, documents=micro.documents)
    hidden = rms(hidden, named["final_norm.weight"], eps)
    batch, seq = micro.tokens.shape
    found = []
    for depth in range(1 + config.mtp):
        layer = f"blocks.{config.n_layers - config.mtp + depth - 1}"
        if depth:
            joined = torch.zeros_like(hidden)
            for row in range(batch):
                for i in range(seq):
                    there = i + depth < seq and (documents is None or documents[row][i] == documents[row][i + depth])
                    token = micro.tokens[row, i + depth] if there else torch.tensor(0)
                    embedded = rms(named["embed.weight"][token], named[f"{layer}.join.embed_norm.weight"], eps)
                    state = rms(hidden[row, i], named[f"{layer}.join.hidden_norm.weight"], eps)
                    joined[row, i] = named[f"{layer}.join.proj.weight"] @ torch.cat((embedded, state))
            block = model.blocks[layer.removeprefix("blocks.")]
            # The block alone: what is around it is computed here.
            inner, outer = block.join, block.predict_norm
            block.join, block.predict_norm = None, torch.nn.Identity()
            rotary = model.rotary(positions, hidden.dtype)
            output = block(joined, rotary, None, None, micro.documents)
            block.join, block.predict_norm = inner, outer
            hidden = rms(output, named[f"{layer}.predict_norm.weight"], eps)
        total = torch.zeros((), dtype=torch.float64)
        for row in range(batch):
            for i in range(seq - depth):
                target = micro.targets[row, i + depth]
                if target == IGNORE or (documents and documents[row][i] != documents[row][i + depth]):
                    continue
                total = total - (head @ hidden[row, i]).log_softmax(0)[target]
        found.append(total)
    return found


def compared(config: ModelConfig, micro: MicroTensors, documents: list[list[int]] | None = None) -> None:
    model = build(config)
    objective = Objective(model, CrossEntropy(Axis("tp"), config.vocab_size), mtp_weight=WEIGHT)
    main, *further = losses_of(model, micro, documents)
    expected = main + WEIGHT * torch.stack(further).mean()
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    loss = objective(micro)
    torch.testing.assert_close(loss, main, rtol=1e-12, atol=0)
    torch.testing.assert_close(objective.take_further(loss)[0], torch.stack(further).mean(), rtol=1e-12, atol=0)
    assert not objective.take_further(loss).any()
    loss.backward()
    for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-12, msg=name)


def test_loss_and_gradients_are_those_of_plain_loops():
    compared(LLAMA, micro_of(LLAMA, masked=4))
    compared(replace(LLAMA, tied=True, mtp=1), micro_of(replace(LLAMA, mtp=1)))


def test_experts_and_latent_attention():
    plain = replace(DEEPSEEK, moe=replace(DEEPSEEK.moe, aux_loss=0.0, bias_balanced=False))
    compared(plain, micro_of(plain))


def test_documents_are_not_crossed():
    numbers = [[0] * 5 + [1] * 7, [0] * 1 + [1] * 2 + [2] * 9]
    compared(LLAMA, micro_of(LLAMA, Documents(torch.tensor(numbers)), masked=2), numbers)


def test_the_main_model_is_that_without_modules():
    model, tokens = build(LLAMA), torch.arange(2 * 12).view(2, 12)
    main = build(LLAMA.main)
    shapes = parameter_shapes(LLAMA)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == shapes
    assert parameter_shapes(LLAMA.main).items() <= shapes.items()
    main.load_state_dict(model.state_dict(), strict=False)
    torch.testing.assert_close(main(tokens), model(tokens), rtol=0, atol=0)


def test_modules_have_the_kind_of_the_layer_before_them():
    mixed = replace(LLAMA, n_layers=5, mtp=1, attention="latent,heads", mla=DEEPSEEK.mla)
    names = parameter_shapes(mixed)
    assert "blocks.4.attn.wq.weight" in names
    assert "blocks.4.attn.wkv_a.weight" in parameter_shapes(
        replace(mixed, attention="latent,heads,latent,heads,latent")
    )


def test_flops_are_those_of_a_block_a_matrix_and_a_head():
    one, block = replace(LLAMA, n_layers=3, mtp=1), replace(LLAMA, n_layers=3, mtp=0)
    d, vocab = LLAMA.d_model, LLAMA.vocab_size
    assert train_flops_per_token(one) - train_flops_per_token(block) == 6 * (2 * d * d + d * vocab)


def test_a_sequence_shorter_than_the_depth_has_no_further_targets():
    tokens = torch.tensor([[1, 2]])
    further = FurtherTokens.of(tokens, tokens + 1, None, 3)
    assert further.tokens.tolist() == [[0, 0]]
    assert further.targets.tolist() == [[IGNORE] * 2]


@pytest.mark.parametrize(
    ("preset", "total", "copies"),
    [("qwen3-next-80b-a3b", 81_324_862_720, 0), ("glm-4.5", 358_337_791_296, 2), ("glm-4.5-air", 110_468_824_832, 2)],
)
def test_the_hub_has_as_many_parameters(preset: str, total: int, copies: int):
    """With the copies of embedding and head that GLM-4.5's files have."""
    main = PRESETS[preset]
    whole = replace(main, n_layers=main.n_layers + 1, mtp=1)
    assert count(whole) + copies * main.vocab_size * main.d_model == total


def test_all_modules_belong_to_the_last_stage():
    model = replace(LLAMA, n_layers=8)
    assert [len(stage) for stage in even(8, 4, 2)] == [2, 2, 2, 2]
    assert [len(stage) for stage in even(8, 7, 2)] == [1] * 6 + [2]
    for stages in (2, 4, 7):
        cut = stages_of(model, Layout(pp=stages), stages)
        assert (cut[-1].stop, cut[-1].start <= 6, len(cut)) == (8, True, stages)
    # The head of each module counts: the last stage has fewer layers.
    assert len(stages_of(replace(model, vocab_size=4000), Layout(pp=2), 2)[-1]) == 2
    job = Job(model=replace(model, vocab_size=37), layout=Layout(pp=4, pp_cut="3+2+2+1", micro_batch=1))
    assert any(
        "leaves 1 of the last 2 layers to earlier stages: modules for further tokens" in text
        for _, text in problems_of(job)
    )
    deep = replace(job, layout=Layout(pp=8, micro_batch=1))
    assert any("nearest legal: pp 7" in text for _, text in problems_of(deep))
    assert "embed.weight" in stage_shapes(model, [range(6, 8)])


def test_preference_pairs_and_tiles_of_the_head_are_refused():
    pairs = Job(model=LLAMA, data=Data(corpus="preferences", path="pairs.jsonl"))
    assert any(path == "model.mtp" and "n_layers=2" in text for path, text in problems_of(pairs))
    tiled = Job(model=LLAMA, layout=Layout(dp_shard=2, zero=3, tiles=2, tile="head"))
    assert any("model.mtp=2" in text for path, text in problems_of(tiled) if path == "layout.tile")
