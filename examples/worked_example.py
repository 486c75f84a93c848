"""The smallest training run, whose every number can be checked by hand.

A linear model y = x1·w1 + x2·w2 + b learns two items, (6, 2) -> 15 and (5, 2) -> 12, by squared error and plain
gradient descent with learning rate 1e-3, from w1 = 0.773, w2 = 0.321, b = 0.067. Three ways:

  one item a step      two steps, each with the gradient of one item
  accumulated          one step with the sum of both gradients
  two ranks            each rank has one item; their gradients are summed: the accumulated answer

    python examples/worked_example.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phalanx.launch.pool import Pool
from phalanx.launch.ranks import Ranks

ITEMS = torch.tensor([[6.0, 2.0], [5.0, 2.0]], dtype=torch.float64)
TARGETS = torch.tensor([15.0, 12.0], dtype=torch.float64)
LEARNING_RATE = 1e-3


def make_model() -> nn.Linear:
    """w1, w2 and b as above, in float64."""
    model = nn.Linear(2, 1, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.773, 0.321]], dtype=torch.float64))
        model.bias.copy_(torch.tensor([0.067], dtype=torch.float64))
    return model


def backward(model: nn.Module, item: int, factor: float = 1.0) -> None:
    """Add the gradient of factor × (prediction - target)² of one item."""
    error = model(ITEMS[item]) - TARGETS[item]
    (factor * error.square()).sum().backward()


def descend(model: nn.Module) -> list[float]:
    """One step down the gradient; returns (w1, w2, b)."""
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(LEARNING_RATE * parameter.grad)
            parameter.grad = None
    return values(model)


def values(model: nn.Module) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def gradients(model: nn.Module) -> list[float]:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).tolist()


def one_item_a_step() -> list[list[float]]:
    """(w1, w2, b) after each of two steps."""
    model = make_model()
    after = []
    for item in range(2):
        backward(model, item)
        after.append(descend(model))
    return after


def accumulated() -> tuple[list[float], list[float]]:
    """The summed gradients of both items, and (w1, w2, b) after one step with them."""
    model = make_model()
    for item in range(2):
        backward(model, item)
    return gradients(model), descend(model)


def one_of_two_ranks(ranks: Ranks) -> tuple[list[float], list[float]]:
    """The same on one of two data-parallel ranks: each has one item, DDP reduces the gradients."""
    model = make_model()
    # DDP averages over the ranks; the factor makes it the sum.
    backward(DistributedDataParallel(model), item=ranks.rank, factor=ranks.world)
    return gradients(model), descend(model)


def show(name: str, numbers: list[float]) -> None:
    print(f"  {name:<22}" + "".join(f"{number:>14.5f}" for number in numbers))


def main() -> None:
    print(f"  {'':<22}{'w1':>14}{'w2':>14}{'b':>14}")
    for step, after in enumerate(one_item_a_step(), 1):
        show(f"one item, step {step}", after)
    summed, after = accumulated()
    show("accumulated gradient", summed)
    show("accumulated, step 1", after)
    with Pool(2) as pool:
        for rank, (summed, after) in enumerate(pool.run(one_of_two_ranks, 2)):
            show(f"rank {rank} gradient", summed)
            show(f"rank {rank}, step 1", after)


if __name__ == "__main__":
    main()
