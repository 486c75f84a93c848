"""What is multiplied: every family of shapes, about forty of them, a dozen when in a hurry."""

import pytest

from phalanx.machine import calibration as compute


@pytest.mark.parametrize("unit", [compute.CPU_UNIT, compute.ACCELERATOR_UNIT])
def test_there_are_about_forty_shapes_and_a_dozen_quick_ones(unit):
    every, some = compute.products_of(unit, quick=False), compute.products_of(unit, quick=True)
    assert 30 <= len(every) <= 45
    assert 8 <= len(some) <= 14
    assert set(some) <= set(every)
    assert len({shape.family for shape in every}) == 6
    assert all(min(shape.m, shape.n, shape.k) >= 64 for shape in every)


def test_a_family_grows_in_one_direction():
    for family in {shape.family for shape in compute.products_of(compute.CPU_UNIT, quick=False)}:
        flops = [s.m * s.n * s.k for s in compute.products_of(compute.CPU_UNIT, quick=False) if s.family == family]
        assert flops == sorted(flops)
        assert len(set(flops)) == len(flops) >= 4
