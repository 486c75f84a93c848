"""What somebody would have taken, and what is said about it."""

from __future__ import annotations

from phalanx.plan.alternatives import alternatives
from phalanx.plan.branch import Found, Search
from phalanx.plan.plan import Alternative
from phalanx.plan.planner import search
from plan.answers import planned, request, slow_network


def named(found: tuple[Alternative, ...], name: str) -> Alternative:
    return next(one for one in found if one.name.startswith(name))


def test_the_kinds_are_what_they_say() -> None:
    plan = planned("llama3-70b", "dgx-h100:8", 256)
    found = plan.alternatives
    assert found[0].name == "rule of thumb"
    ddp = named(found, "DDP").candidate
    assert ddp is not None
    assert ddp.layout.dp_replicate == ddp.layout.world == 64
    assert not ddp.prediction.fits
    hsdp = named(found, "HSDP").candidate
    assert hsdp is not None
    assert (hsdp.layout.dp_shard, hsdp.layout.dp_replicate) == (8, 8)
    tensor = named(found, "tensor parallel inside a node").candidate
    assert tensor is not None
    assert (tensor.layout.tp, tensor.layout.zero) == (8, 3)
    megatron = named(found, "Megatron-LM").candidate
    assert megatron is not None
    assert (megatron.layout.tp, megatron.layout.schedule) == (8, "1f1b")
    assert megatron.layout.pp > 1


def test_none_is_faster_than_the_best() -> None:
    for plan in (planned("llama3-70b", "dgx-h100:8", 256), planned("llama3-8b", slow_network(2), 64)):
        for one in plan.alternatives:
            if one.candidate and one.candidate.prediction.fits:
                assert one.candidate.seconds >= plan.best[0].seconds * 0.99, one.name


def test_each_is_the_same_without_the_bound_of_what_was_predicted() -> None:
    one = Search(request("llama3-8b", "dgx-h100:1", 64))
    found = one.best()
    assert alternatives(one, found, None, None) == alternatives(one, Found(), None, None)
    assert len(found.predicted) > 10


def test_each_says_why_with_figures() -> None:
    for one in planned("llama3-70b", "dgx-h100:8", 256).alternatives:
        if one.candidate and one.candidate.prediction.fits:
            assert "as fast" in one.why or "nothing better" in one.why
        elif one.candidate:
            assert "exceeds memory by " in one.why
            assert "the largest part is" in one.why


def test_those_that_fit_come_first_the_fastest_before_the_others() -> None:
    _, *rest = planned("llama3-70b", "dgx-h100:8", 256).alternatives
    fits = [bool(one.candidate and one.candidate.prediction.fits) for one in rest]
    assert fits == sorted(fits, reverse=True)
    times = [one.candidate.seconds for one in rest if one.candidate and one.candidate.prediction.fits]
    assert times == sorted(times)


def test_what_is_not_legal_says_the_equation() -> None:
    found = alternatives(Search(request("gpt2", "dgx-h100:4", 16)), Found(), None, None)
    ddp = named(found, "DDP")
    assert ddp.candidate is None
    assert "16" in ddp.why
    assert "32" in ddp.why


def test_what_is_fixed_is_said() -> None:
    plan = search(request("gpt2", "dgx-h100:1", 64, tp=2))
    ddp = named(plan.alternatives, "DDP")
    assert ddp.candidate is None
    assert "tp 2" in ddp.why
    rule = plan.alternatives[0]
    assert rule.candidate is None
    assert "breaks the fixed fields: tp 2" in rule.why


def test_a_kind_that_has_the_best_in_it_is_left_out() -> None:
    plan = search(request("gpt2", "dgx-h100:1", 512, dp_replicate=8))
    assert not any(one.name.startswith("DDP") for one in plan.alternatives)


def test_one_device_has_no_kinds_but_the_rule() -> None:
    plan = search(request("gpt2", "gh200:1", 16))
    assert [one.name for one in plan.alternatives] == ["rule of thumb"]
