"""Recomputation changes what is kept, not what is computed."""

import pytest
import torch

from phalanx.comm.axis import Axis
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.model.seeding import Noise, initialise
from phalanx.model.transformer import Transformer
from phalanx.parallel.objective import MicroTensors, Objective
from phalanx.parallel.recompute import recompute
from phalanx.parallel.vocabulary import CrossEntropy
from phalanx.partition.derived import MODES, modes, written

VOCAB, SEQ, BATCH, WIDTH, LAYERS = 11, 32, 2, 16, 3
NONE, PRODUCTS, SELECTIVE, FULL = (Layout(recompute=mode) for mode in MODES)
MIXED = Layout(recompute_cut="1*full+1*selective+1*none")


def step(layout: Layout, dropout: float) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """Loss, gradients, and the bytes kept for the backward pass."""
    shape = ModelConfig(n_layers=LAYERS, d_model=WIDTH, n_heads=4, seq_len=SEQ, dropout=dropout)
    model = Transformer(shape, VOCAB).double()
    initialise(model, shape, 3)
    assert recompute(model, layout) == sum(mode != "none" for mode in modes(written(layout), LAYERS))
    tokens = torch.arange(BATCH * SEQ).reshape(BATCH, SEQ) % VOCAB
    noise = Noise(1, 2, [4, 5]) if dropout else None
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = Objective(model, CrossEntropy(Axis("tp"), VOCAB))(MicroTensors(tokens, tokens, noise))
    total = sum(kept.values())
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, total


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("layout", [PRODUCTS, SELECTIVE, FULL, MIXED], ids=Layout.line)
def test_same_bits_with_less_kept(layout, dropout):
    expected_loss, expected, all_kept = step(NONE, dropout)
    loss, gradients, kept = step(layout, dropout)
    assert torch.equal(loss, expected_loss)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name
    assert kept < all_kept


def test_selective_leaves_out_the_attention_probabilities():
    with_dropout = step(NONE, 0.3)[2] - step(SELECTIVE, 0.3)[2]
    probabilities = LAYERS * BATCH * 4 * SEQ * SEQ * 8
    assert with_dropout >= 2 * probabilities  # softmax's output and the dropped one, in float64


def test_full_keeps_little_more_than_the_blocks_inputs():
    block_input = BATCH * SEQ * WIDTH * 8
    one_layer_less = step(FULL, 0.0)[2] - LAYERS * block_input
    assert one_layer_less < step(NONE, 0.0)[2] / LAYERS


def test_each_layer_does_as_it_is_told():
    """Dropout makes all three differ: of each layer what its mode keeps is kept."""
    none, selective, full, mixed = (step(layout, 0.3)[2] for layout in (NONE, SELECTIVE, FULL, MIXED))
    around = 0.03 * none  # rotary tables and the like, which are kept once
    assert mixed == pytest.approx((none + selective + full) / 3, abs=around)


def test_a_stage_goes_by_the_layers_of_the_whole_model():
    shape = ModelConfig(n_layers=LAYERS, d_model=WIDTH, n_heads=4, seq_len=SEQ)
    model = Transformer(shape, VOCAB)
    del model.blocks["0"], model.blocks["1"]
    assert recompute(model, Layout(recompute_cut="2*none+1*full")) == 1
    assert recompute(model, Layout(recompute_cut="2*full+1*none")) == 0


def test_layouts_name_it():
    assert Layout(recompute="full").line() == "recompute=full"
