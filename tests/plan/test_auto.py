"""What `layout: auto` asks the planner, and what it says where there is no answer. The search is a fake."""

from dataclasses import replace

import pytest

from phalanx.check.load import load_words
from phalanx.config import overrides
from phalanx.config.layout import Layout
from phalanx.cost.prediction import predict
from phalanx.errors import DoesNotFitError, JobError
from phalanx.plan import planner as auto
from phalanx.plan.plan import Candidate, Plan
from phalanx.plan.space import plan_request

VOCAB = 256


def job_of(*words):
    return load_words(overrides.parse(["layout=auto", "cluster=dgx-h100:1", *words])).job


@pytest.fixture
def asked(monkeypatch):
    """Every question that was asked; the answer is one layout that keeps what is fixed, which fits or not."""
    requests = []

    def search(request, progress):
        requests.append(request)
        if request.fixed.get("tp") == 2:  # as if nothing with it were legal
            return plan_of(request, (), None)
        spec = request.spec(Layout(**{"dp_replicate": request.devices[-1], **request.fixed}))
        found = Candidate(spec, predict(spec).step_time_s)
        fits = found.prediction.fits
        return plan_of(request, (found,) if fits else (), None if fits else found)

    monkeypatch.setattr(auto, "search", search)
    return requests


def plan_of(request, best, nearest):
    spec = replace(request.spec(Layout()), layout=Layout())
    return Plan(spec, best, nearest, (), (), {"tp 2 is odd": 3, "no": 40}, 43, 0.5, ())


def chosen(job, *fixed, worlds=()):
    request = plan_request(job, VOCAB, {name: getattr(job.layout, name) for name in fixed})
    return auto.choose(replace(request, worlds=worlds))


def test_what_is_fixed_and_the_devices_go_to_the_search(asked):
    plan = chosen(job_of("layout.zero=2", "train.global_batch=64"), "zero", worlds=(4, 8))
    assert (asked[0].fixed, asked[0].devices, asked[0].global_batch) == ({"zero": 2}, (4, 8), 64)
    assert asked[0].model.vocab_size == VOCAB
    assert (plan.best[0].layout.dp_replicate, plan.best[0].layout.zero) == (8, 2)


def test_all_devices_of_the_cluster_where_nobody_says_how_many(asked):
    chosen(job_of())
    assert asked[0].devices == (8,)


def test_what_does_not_fit_says_by_how_much_and_what_would_help(asked):
    with pytest.raises(DoesNotFitError) as caught:
        chosen(job_of("model=llama3-70b", "train.precision=bf16"))
    assert caught.value.exit_code == 3
    text = str(caught.value)
    assert text.startswith("layout auto: none of 43 layouts fits. The one that needs the least memory, dp_replicate=8,")
    assert " does not fit: " in text
    assert " exceeds the " in text
    assert "layout.dp_replicate=1 layout.dp_shard=8" in text


def test_nothing_legal_names_what_is_fixed_and_the_reasons(asked):
    with pytest.raises(JobError) as caught:
        chosen(job_of("layout.tp=2", "layout.sp=true"), "tp", "sp")
    text = str(caught.value)
    assert text.startswith("layout auto,tp=2,sp=true: no such layout is legal for this model, global batch 16 and 8 ")
    assert "change the number of devices (cluster.devices_per_node)\n  40 layouts: no\n  3 layouts: tp 2 is odd" in text


def test_unknown_devices_are_a_problem_of_the_job(asked):
    with pytest.raises(JobError, match="how many devices are there"):
        chosen(load_words(overrides.parse(["layout=auto"])).job)
