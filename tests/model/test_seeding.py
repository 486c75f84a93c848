from __future__ import annotations

from itertools import product

from phalanx.model.seeding import derive_seed


def test_streams_stay_as_they_are():
    """A change here changes every run that is resumed or repeated."""
    assert derive_seed(1337, "init", "embed.weight") == 13_559_255_888_090_162_834


def test_every_part_of_the_key_counts():
    keys = list(product((1, 2), ("init", "dropout"), ("a", "b"), (0, 1)))
    assert len({derive_seed(*key) for key in keys}) == len(keys)
    assert all(0 <= derive_seed(*key) < 2**64 for key in keys)
