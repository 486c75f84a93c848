"""FSDP2's private names: for every supported version of torch they are there, and do what ZeRO-3 relies on."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from phalanx.launch.ranks import Ranks
from phalanx.parallel import fsdp_private

SUPPORTED = ("2.11", "2.12", "2.13")
"""pyproject.toml allows these minor versions of torch, and no others."""
INSTALLED = ".".join(torch.__version__.split(".")[:2])


@pytest.fixture(params=SUPPORTED)
def version(request) -> str:
    """One supported version of torch, where it is the one that is installed."""
    if request.param != INSTALLED:
        pytest.skip(f"checks torch {request.param}, and torch {torch.__version__} is installed")
    return request.param


def test_the_bounds_of_torch_are_the_versions_that_are_checked():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    first, last = SUPPORTED[0], SUPPORTED[-1]
    after = f"{last.split('.')[0]}.{int(last.split('.')[1]) + 1}"
    assert f'"torch>={first},<{after}"' in text


def test_the_private_names_are_there(version):
    del version
    for kind in (fsdp_private.AllGather, fsdp_private.ReduceScatter):
        assert inspect.isabstract(kind)
        assert set(kind.__abstractmethods__) >= {"__call__"}
        assert "allocate" in dir(kind)
    assert callable(FSDPModule._set_unshard_async_op)
    assert callable(FSDPModule._get_fsdp_state)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (SimpleNamespace(_fsdp_param_groups=["a", "b"], _fsdp_param_group="a"), ["a", "b"]),
        (SimpleNamespace(_fsdp_param_group="a"), ["a"]),
        (SimpleNamespace(_fsdp_param_group=None), []),
    ],
    ids=["from 2.12 on", "2.11", "2.11 without parameters"],
)
def test_the_groups_of_a_module_are_found_under_the_name_of_each_version(state, expected):
    module: Any = SimpleNamespace(_get_fsdp_state=lambda: state)
    assert fsdp_private._groups(module) == expected


def sharded() -> tuple[FSDPModule, nn.Linear]:
    """A layer of two parameters, sharded over all ranks."""
    layer = nn.Linear(4, 4)
    fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), reshard_after_forward=False)
    assert isinstance(layer, FSDPModule)
    layer.set_gradient_divide_factor(1.0)
    layer.set_force_sum_reduction_for_comms(True)
    fsdp_private.start_gathers_early(layer, enabled=True)
    return layer, layer


def keeps_what_it_sent(module: FSDPModule) -> bool:
    context = module._get_fsdp_state()._comm_ctx
    return any(getattr(context, name, None) for name in ("reduce_scatter_states", "reduce_scatter_state"))


def gradient_of_the_first_half(ranks: Ranks) -> dict[str, Any]:
    """Gradients that autograd does not bring: taken in, completed with zeros, and reduced on request."""
    module, layer = sharded()
    module.set_requires_gradient_sync(False)
    module.set_is_last_backward(False)
    whole_before = fsdp_private.is_whole(module)
    y = layer(torch.ones(1, 4))
    whole_after_forward = fsdp_private.is_whole(module)
    y.sum().backward()
    (group,) = fsdp_private._groups(module)
    weight, bias = group.fsdp_params
    # As a deferred weight's gradient comes: past autograd, when it is through.
    weight._unsharded_param.grad = torch.full_like(weight._unsharded_param, ranks.rank + 1.0)
    weight.unsharded_accumulated_grad = bias.unsharded_accumulated_grad = None
    bias._unsharded_param.grad = None
    fsdp_private.take_in_gradients(module)
    fsdp_private.fill_missing_gradients(module)
    module.set_requires_gradient_sync(True)
    module.set_is_last_backward(True)
    fsdp_private.reduce_gradients(module)
    keeps_sent = keeps_what_it_sent(module)
    fsdp_private.release_sent(module)
    released = keeps_what_it_sent(module)
    fsdp_private.finish_backward(module)
    module.reshard()
    found = {name: p.grad for name, p in layer.named_parameters()}
    return {
        "keeps sent": (keeps_sent, released),
        "whole": (whole_before, whole_after_forward, fsdp_private.is_whole(module)),
        "gradients": {name: g.to_local().tolist() for name, g in found.items() if isinstance(g, DTensor)},
    }


def test_gradients_that_autograd_does_not_bring_are_reduced_on_request(ranks, version):
    del version
    for result in ranks(gradient_of_the_first_half, 2):
        assert result["keeps sent"] == (True, False)
        assert result["whole"] == (False, True, False)
        assert result["gradients"] == {"weight": [[3.0] * 4] * 2, "bias": [0.0, 0.0]}, "1 + 2, and zeros"


def sent_shares_of(ranks: Ranks) -> list[tuple[int, tuple[int, ...], bool]]:
    devices = init_device_mesh("cpu", (ranks.world,))
    module = nn.Linear(4, 5)
    module.bias.requires_grad_(False)
    group = fully_shard(module, mesh=devices)
    return [(each.elements, tuple(each.shape), each.trained) for each in fsdp_private.sent_shares(group)]


def test_shares_are_sent_in_the_order_of_the_parameters_with_padding(ranks, version):
    """5 rows on 2 ranks are 3 and 2, padded to 3."""
    del version
    for found in ranks(sent_shares_of, 2):
        assert found == [(3 * 4, (5, 4), True), (3, (5,), False)]
