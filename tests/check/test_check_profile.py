"""The rules for profiles: every wrong field with its nearest legal value; the words and lists of ranks."""

import pytest

from phalanx.check.load import load_words
from phalanx.config import overrides
from phalanx.errors import JobError

WORDS = ["model=tiny", "data.corpus=random", "optimizer.warmup_steps=0", "train.steps=50", "dp_replicate=2"]


def load(*words):
    return load_words(overrides.parse([*WORDS, *words])).job


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ([], (0, 1)),
        (["train.profile.ranks=all"], (0, 1)),
        (["train.profile.ranks=1"], (1,)),
        (["train.profile.ranks=[1,0]"], (1, 0)),
    ],
)
def test_ranks_are_a_word_or_a_list(words, ranks):
    profile = load("train.profile.steps=10,12", *words).train.profile
    assert profile.is_on
    assert profile.traced(2) == ranks
    assert len(profile.traced(64)) == min(16, len(profile.traced(64)))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["steps=12,10"], "the first is 12, the last 10; nearest legal: [10, 12]"),
        (["steps=0,3"], "[0, 3] lies outside of steps 1 to 50; nearest legal: [1, 3]"),
        (["steps=40,51"], "[40, 51] lies outside of steps 1 to 50; nearest legal: [40, 50]"),
        (["steps=60,70"], "[60, 70] lies outside of steps 1 to 50; nearest legal: [50, 50]"),
        (
            ["steps=1,21"],
            "a trace of one step takes megabytes per rank: at most 20; nearest legal: [1, 20]",
        ),
        (["steps=-1,3"], "must not be negative, are (-1, 3)"),
        (["steps=3"], "expected 2 values, found 1"),
        (["memory=true"], "no step is profiled"),
        (["steps=1,2", "ranks=0,2"], "are [0, 2], but there are ranks 0 to 1; nearest legal: [0, 1]"),
        (["steps=1,2", "ranks=1,1"], "each once: [1]"),
        (["steps=1,2", "ranks=some"], "expected all or a list of whole numbers, found 'some'"),
        (["stpes=1,2"], "did you mean train.profile.steps?"),
    ],
)
def test_what_is_wrong_is_said_with_the_nearest_legal_value(words, said):
    with pytest.raises(JobError) as error:
        load(*(f"train.profile.{word}" for word in words))
    assert said in str(error.value)


@pytest.mark.parametrize("words", [["layout.sync=asp"], ["layout.data_parallel=threads"]])
def test_steps_that_ranks_do_not_take_together_are_refused(words):
    with pytest.raises(JobError, match=r"train.profile.steps.*nearest legal"):
        load("train.profile.steps=1,2", *words)
