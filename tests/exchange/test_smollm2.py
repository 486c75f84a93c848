"""The real SmolLM2-135M-Instruct, from a GGUF file that PHALANX_SMOLLM2 names (docs/guides/gguf.md has its source)."""

import os
from pathlib import Path

import pytest
import torch

from phalanx.data.template import own_template
from phalanx.data.tokenizer import Tokenizer
from phalanx.exchange.gguf import import_gguf
from phalanx.generate.engine import Engine, GenerationRequest
from phalanx.generate.load import find_on_ranks, load_run
from phalanx.generate.ranks import load_part
from phalanx.generate.sampling import Sampling

PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
TEXT = "The quick brown fox jumps over the lazy dog. In 1492, Columbus sailed the ocean blue; it's a story.\n" * 3


@pytest.fixture(scope="module")
def file() -> Path:
    path = os.environ.get("PHALANX_SMOLLM2")
    if not path or not os.path.isfile(path):
        pytest.skip("PHALANX_SMOLLM2 names no SmolLM2-135M-Instruct.Q4_1.gguf")
    pytest.importorskip("gguf")
    return Path(path)


def all_logits(ranks, run, tokens, tp, pp):
    """Returns the logits after every token but the first, on rank 0."""
    part = load_part(find_on_ranks(run, 0), torch.device("cpu"), tp, pp)
    part.prefill("text", tokens[:1], 1, True)
    return part.step("text", [tokens[1:]])


def test_first_layers_compute_the_same_under_tp_and_pp(file, ranks, tmp_path):
    done = import_gguf(file, tmp_path / "slice", layers=2)
    assert done.model.n_layers == 2
    assert done.tokens == done.model.vocab_size == 49152
    model = load_run(tmp_path / "slice").decoder.model
    tokens = Tokenizer.load(tmp_path / "slice").encode(TEXT).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([tokens]))[:, 1:]
    for tp, pp in ((1, 2), (3, 1)):
        found, *_ = ranks(all_logits, tp * pp, tmp_path / "slice", tokens, tp, pp)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
        assert (found.argmax(-1) == expected.argmax(-1)).float().mean() >= 0.999


@pytest.mark.skipif(not os.environ.get("PHALANX_SMOLLM2_WHOLE"), reason="`make test-smollm2` compares the whole model")
def test_the_whole_model_computes_what_transformers_computes(file, ranks, tmp_path):
    """In float32: at most 1e-3 apart, and the same best token at 99.9 % of all positions."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    run = tmp_path / "run"
    import_gguf(file, run)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.float32
    ).eval()
    tokenizer = Tokenizer.load(run)
    tokens = tokenizer.encode(Path(__file__).read_text())[:512].tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits
    loaded = load_run(run)
    with torch.no_grad():
        _close("one process", loaded.decoder.model(torch.tensor([tokens])), expected)
    for tp, pp in ((3, 1), (1, 2)):
        found, *_ = ranks(all_logits, tp * pp, run, tokens, tp, pp, timeout=600)
        _close(f"tp={tp},pp={pp}", found, expected[:, 1:])
    [(prompt, _)] = loaded.tokenizer.encode_marked([[(PROMPT, False)]])  # with special tokens
    request = GenerationRequest(prompt.tolist(), Sampling(12, temperature=0), ends=loaded.tokenizer.end_ids)
    Engine(loaded.decoder).run([request])
    print(loaded.tokenizer.decode(request.new_tokens))
    assert "Paris" in loaded.tokenizer.decode(request.new_tokens)
    assert own_template(run)


def _close(layout, found, expected):
    apart = (found - expected).abs().max().item()
    same = (found.argmax(-1) == expected.argmax(-1)).float().mean().item()
    print(f"{layout}: {expected.shape[1]} positions, {apart:.2e} apart, {100 * same:.2f} % with the same best token")
    assert apart < 1e-3
    assert same >= 0.999
