"""The tensors that a state needs which is converted to a run's: the optimizer's own only where it keeps them."""

from phalanx.checkpoint.convert import _needed
from phalanx.config.job import Optimizer

SHAPES = {"norm.weight": (128,), "down.weight": (128, 512)}


def test_scales_are_needed_of_quantised_parameters_only():
    kinds = ["exp_avg", "exp_avg_scale", "master", "replica1/exp_avg_scale"]
    assert set(_needed(Optimizer(name="adamw8bit"), kinds, SHAPES)) == {
        *(f"{kind}/down.weight" for kind in kinds),
        "exp_avg/norm.weight",
        "master/norm.weight",
    }
