"""What is multiplied: every family of shapes, about forty of them, a dozen when in a hurry."""

import pytest

from phalanx.calibrate import shapes


@pytest.mark.parametrize("unit", [shapes.CPU_UNIT, shapes.ACCELERATOR_UNIT])
def test_there_are_about_forty_shapes_and_a_dozen_quick_ones(unit):
    every, some = shapes.products(unit, quick=False), shapes.products(unit, quick=True)
    assert 30 <= len(every) <= 45
    assert 8 <= len(some) <= 14
    assert set(some) <= set(every)
    assert len({shape.family for shape in every}) == 6
    assert all(min(shape.m, shape.n, shape.k) >= 64 for shape in every)


def test_a_family_grows_in_one_direction():
    for family in {shape.family for shape in shapes.products(shapes.CPU_UNIT, quick=False)}:
        flops = [s.m * s.n * s.k for s in shapes.products(shapes.CPU_UNIT, quick=False) if s.family == family]
        assert flops == sorted(flops)
        assert len(set(flops)) == len(flops) >= 4
