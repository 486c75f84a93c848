"""The loss of preference pairs, against the formula of the paper."""

import pytest
import torch
import torch.nn.functional as F

from phalanx.comm.axis import Axis
from phalanx.config.job import IGNORE, DpoOptions
from phalanx.config.model import ModelConfig
from phalanx.model.transformer import Transformer
from phalanx.parallel.objective import MicroTensors, Objective, PairFacts, PairLoss
from phalanx.parallel.vocabulary import CrossEntropy

SMALL = ModelConfig(n_layers=1, d_model=16, n_heads=2, seq_len=8)
VOCAB = 11


def pairs(rows: int = 6, padding: int = 0) -> MicroTensors:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCAB, (rows, 9), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[torch.arange(8) < torch.randint(1, 7, (rows, 1), generator=generator)] = IGNORE
    reference = torch.randn(rows, generator=generator, dtype=torch.float64) - 9
    if padding:
        targets[-padding:], reference[-padding:] = IGNORE, torch.nan
    return MicroTensors(tokens[:, :-1], targets, reference=reference)


def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(SMALL, VOCAB).double()


def expected(transformer: Transformer, micro: MicroTensors, rows: int, beta: float, smoothing: float) -> torch.Tensor:
    """Equation 7 of Rafailov et al. 2023, pair by pair; smoothed as Mitchell 2023, equation 3."""
    total = torch.zeros((), dtype=torch.float64)
    for row in range(0, rows, 2):
        ratios = []
        for each in (row, row + 1):
            log_p = transformer(micro.tokens[each : each + 1])[0].log_softmax(-1)
            answer = [(place, token) for place, token in enumerate(micro.targets[each].tolist()) if token != IGNORE]
            ratios.append(sum(log_p[place, token] for place, token in answer) - micro.reference[each])
        z = beta * (ratios[0] - ratios[1])
        total = total - (1 - smoothing) * torch.sigmoid(z).log() - smoothing * torch.sigmoid(-z).log()
    return total


@pytest.mark.parametrize("chunk", [0, 5])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_and_gradients_are_those_of_the_formula(smoothing, chunk):
    micro, transformer = pairs(padding=2), model()
    loss = PairLoss(DpoOptions(0.3, smoothing), Axis("cp"))
    objective = Objective(transformer, CrossEntropy(Axis("tp"), VOCAB), loss, chunk)
    found = objective(micro)
    gradients = torch.autograd.grad(found, list(transformer.parameters()))
    formula = expected(transformer, micro, 4, 0.3, smoothing)
    torch.testing.assert_close(found, formula, rtol=1e-12, atol=0)
    for mine, theirs in zip(gradients, torch.autograd.grad(formula, list(transformer.parameters())), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-13)
    assert objective.counted(micro) == 2


def test_facts_are_means_over_pairs_without_padding():
    loss = PairLoss(DpoOptions(0.5), Axis("cp"))
    reference = torch.tensor([-3.0, -3, -1, -1, torch.nan, torch.nan], dtype=torch.float64)
    micro = MicroTensors(torch.zeros(6, 1), torch.zeros(6, 1), reference=reference)
    first = loss(torch.tensor([1.0, 2, 4, 3, 0, 0], dtype=torch.float64), micro)  # -log p
    assert first == pytest.approx(sum(-F.logsigmoid(torch.tensor([0.5, -0.5]))))
    assert loss.log_probabilities is not None
    assert loss.log_probabilities[:4].tolist() == [-1, -2, -4, -3]
    facts = PairFacts.of(loss.take(first))
    assert facts == PairFacts(
        reward_chosen=pytest.approx(0.5 * (2 - 3) / 2),
        reward_rejected=pytest.approx(0.5 * (1 - 2) / 2),
        reward_margin=pytest.approx(0),
        reward_accuracy=0.5,
    )
    assert PairFacts.of(loss.take(first)) is None
