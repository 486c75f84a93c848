from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.kinds import KINDS, build, tokens
from phalanx.model.seeding import Noise, dropout


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("split", [(4,), (2, 2), (1, 3), (1, 1, 1, 1)])
def test_any_split_of_a_batch_gives_the_same_logits(kind: str, split: tuple[int, ...]):
    model = replace(KINDS[kind], dropout=0.25)
    transformer, inputs, samples = build(model), tokens(model, 4, 10), (11, 7, 3, 1000)
    whole = transformer(inputs, noise=Noise(1, 2, samples))
    parts, start = [], 0
    for size in split:
        rows = slice(start, start + size)
        parts.append(transformer(inputs[rows], noise=Noise(1, 2, samples[rows])))
        start += size
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)


def test_every_kind_of_site_drops():
    """With one sample alone differing, each site's mask shows in what the model computes."""
    model = replace(KINDS["gpt2"], dropout=0.5)
    transformer, inputs = build(model), tokens(model, 1, 10)
    sites: list[str] = []

    class Recorder(Noise):
        def _keep(self, site: str, *rest, **more):
            sites.append(site)
            return super()._keep(site, *rest, **more)

    transformer(inputs, noise=Recorder(1, 2, (3,)))
    block = ("attn.probabilities", "attn.residual", "mlp.residual")
    assert sites == ["embed", *(f"blocks.{layer}.{site}" for layer in range(2) for site in block)]


def test_each_part_of_the_key_changes_the_mask():
    ones = torch.ones(1, 16, 16)
    base = Noise(1, 2, (3,)).dropout(ones, 0.5, "a")
    assert torch.equal(base, Noise(1, 2, (3,)).dropout(ones, 0.5, "a"))
    for noise, site in (
        (Noise(9, 2, (3,)), "a"),
        (Noise(1, 9, (3,)), "a"),
        (Noise(1, 2, (9,)), "a"),
        (Noise(1, 2, (3,)), "b"),
    ):
        differing = (noise.dropout(ones, 0.5, site) != base).float().mean().item()
        assert 0.3 < differing < 0.7


def test_masks_do_not_depend_on_the_data_type():
    noise = Noise(1, 2, (3, 4))
    masks = [
        noise.dropout(torch.ones(2, 5, 7, dtype=dtype), 0.3, "a") != 0
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
    ]
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])


def test_a_shard_of_the_heads_meets_its_part_of_the_mask():
    probabilities = torch.ones(2, 6, 5, 5)
    whole = Noise(1, 2, (3, 4)).dropout_heads(probabilities, 0.4, "a", n_heads=6)
    for part in range(3):
        here = slice(2 * part, 2 * part + 2)
        shard = Noise(1, 2, (3, 4), heads=(part, 3)).dropout_heads(probabilities[:, here], 0.4, "a", n_heads=6)
        assert torch.equal(shard, whole[:, here])


@settings(max_examples=40)
@given(samples=st.integers(1, 6), each=st.integers(1, 4), parts=st.integers(1, 5))
def test_a_part_of_the_tokens_meets_its_part_of_the_mask(samples: int, each: int, parts: int):
    """Tokens are in the order (sample, position), so a part may begin and end within a sample."""
    ids, width = range(7, 7 + samples), 3
    whole = Noise(1, 2, ids).dropout(torch.ones(samples, each * parts, width), 0.4, "a")
    found = [
        Noise(1, 2, ids, tokens=(part, parts)).dropout(torch.ones(samples, each, width), 0.4, "a").flatten(0, 1)
        for part in range(parts)
    ]
    assert torch.equal(torch.cat(found), whole.flatten(0, 1))


@settings(deadline=None, max_examples=20)
@given(p=st.floats(0.01, 0.95), shape=st.sampled_from([(2, 200, 151), (3, 4, 100, 99), (1, 100_003)]))
def test_the_share_dropped_is_p_and_the_mean_is_kept(p: float, shape: tuple[int, ...]):
    x = torch.ones(shape, dtype=torch.float64, requires_grad=True)
    y = Noise(5, 0, range(shape[0])).dropout(x, p, "a")
    deviation = 5 * (p * (1 - p) / x.numel()) ** 0.5  # five standard deviations
    assert abs((y == 0).double().mean().item() - p) < deviation + 2**-16
    assert abs(y.mean().item() - 1) < deviation / (1 - p) + 1e-12
    y.sum().backward()
    assert torch.equal(x.grad, y)


def test_neighbouring_elements_are_independent():
    """Four elements share one 64-bit draw: none may follow from another."""
    kept = (Noise(1, 2, (3,)).dropout(torch.ones(1, 400_000), 0.5, "a")[0] != 0).double().view(-1, 4)
    correlation = torch.corrcoef(kept.T)
    assert (correlation - torch.eye(4, dtype=torch.float64)).abs().max() < 0.015


def test_without_noise_or_probability_nothing_happens():
    x = torch.randn(2, 3)
    assert dropout(x, 0.5, None, "a") is x
    assert dropout(x, 0.0, Noise(1, 2, (3, 4)), "a") is x


def test_the_module_mode_does_not_matter():
    model = replace(KINDS["gpt2"], dropout=0.5)
    transformer, inputs, noise = build(model), tokens(model, 2, 10), Noise(1, 2, (3, 4))
    assert torch.equal(transformer.train()(inputs, noise=noise), transformer.eval()(inputs, noise=noise))
    assert torch.equal(transformer.train()(inputs), transformer.eval()(inputs))


def test_a_batch_of_another_size_than_the_sample_ids_is_refused():
    with pytest.raises(ValueError, match=r"mask \(1, 3\) for activations \(2, 3\)"):
        Noise(1, 2, (3,)).dropout(torch.ones(2, 3), 0.5, "a")


@pytest.mark.parametrize("spans", [2, 3, 4])
@pytest.mark.parametrize("parts", [1, 2])
def test_slices_of_sequences_meet_the_masks_of_whole_ones(spans: int, parts: int):
    """Also where tensor ranks have a part of the tokens: of a slice as of a whole sequence."""
    samples, tokens, width = 3, 24, 5
    whole = Noise(1, 2, (4, 5, 6)).dropout(torch.ones(samples, tokens, width), 0.4, "a")
    for span, expected in enumerate(whole.split(tokens // spans, 1)):
        flat = expected.flatten(0, 1)
        places = torch.arange(tokens * span // spans, tokens * (span + 1) // spans)
        mine = [
            Noise(1, 2, (4, 5, 6), tokens=(part, parts), places=places, seq_len=tokens).dropout(
                torch.ones(samples, tokens // spans // parts, width), 0.4, "a"
            )
            for part in range(parts)
        ]
        assert torch.equal(torch.cat([each.flatten(0, 1) for each in mine]), flat)


@pytest.mark.parametrize("spans", [1, 2, 4])
@pytest.mark.parametrize("parts", [1, 2])
def test_slices_of_queries_meet_the_masks_of_all_keys_so_far(spans: int, parts: int):
    heads, tokens = 4, 8
    whole = Noise(1, 2, (4, 5)).dropout_heads(torch.ones(2, heads, tokens, tokens), 0.4, "a", heads)
    for span in range(spans):
        first, last = tokens * span // spans, tokens * (span + 1) // spans
        for part in range(parts):
            mine = range(heads * part // parts, heads * (part + 1) // parts)
            noise = Noise(1, 2, (4, 5), heads=(part, parts), places=torch.arange(first, last), seq_len=tokens)
            found = noise.dropout_heads(torch.ones(2, len(mine), last - first, last), 0.4, "a", heads)
            assert torch.equal(found, whole[:, mine.start : mine.stop, first:last, :last])
