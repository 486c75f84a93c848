"""A run that resumes with another length keeps the end of its learning rate's schedule, unless the job sets it."""

from dataclasses import replace

import pytest

from phalanx.config.job import Job
from phalanx.train.learning_rate import end_of, resumed_end


def job(steps: int, **optimizer) -> Job:
    plain = Job()
    return replace(
        plain,
        train=replace(plain.train, steps=steps),
        optimizer=replace(plain.optimizer, lr=4e-3, warmup_steps=20, **optimizer),
    )


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_a_longer_run_keeps_the_end_and_says_how_to_move_it(schedule):
    end = resumed_end(job(1000, schedule=schedule), job(500, schedule=schedule), 500, None)
    assert end.step == 500
    assert end.message.startswith("learning rate: 4.00e-04 at step 501: its schedule still ends at step 500, ")
    assert "not at train.steps=1000; optimizer.decay_steps=1000 moves the end, and the rate jumps to " in end.message


def test_the_kept_end_outlives_the_checkpoints_after_it():
    assert resumed_end(job(1000), job(1000), 700, 500).step == 500
    assert resumed_end(job(300), job(500), 200, None).step == 500


def test_the_job_s_own_end_holds_and_the_jump_is_said():
    end = resumed_end(job(1000, decay_steps=1000), job(500), 500, 500)
    assert (end.step, end.message) == (1000, "learning rate: jumps at step 501 from 4.00e-04 to 2.26e-03")
    assert resumed_end(job(1000, decay_steps=1000), job(1000, decay_steps=1000), 500, 1000).message == ""


def test_the_end_moves_where_the_rate_stays():
    assert resumed_end(job(1000), job(500), 10, None).step == 1000  # in the warm-up
    held = resumed_end(job(1000, schedule="wsd"), job(500, schedule="wsd"), 300, None)
    assert (held.step, held.message) == (1000, "")
    assert resumed_end(job(500), job(500), 200, 500).message == ""


def test_another_peak_is_a_jump():
    end = resumed_end(replace(job(500), optimizer=replace(job(500).optimizer, lr=8e-3)), job(500), 100, 500)
    assert end.step == end_of(job(500))
    assert end.message == "learning rate: jumps at step 101 from 3.76e-03 to 7.52e-03"
