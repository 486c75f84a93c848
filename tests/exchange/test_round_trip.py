"""Import, then export: folders and files of other programs, imported as runs and exported."""

import json

import pytest
import torch
from safetensors.torch import load_file

from exchange import gguf_files
from exchange.test_gguf import llama
from families.counterparts import COUNTERPARTS, small_model
from phalanx.checkpoint.consolidated import open_source
from phalanx.cli.main import main
from phalanx.config.presets import PRESETS
from phalanx.data.tokenizer import Tokenizer, train_bpe
from phalanx.exchange.export import export

SAME = ("llama3.1-8b", "qwen2.5-7b", "mixtral-8x7b", "gpt2", "gpt-neox-20b")


def run(*words: object) -> int:
    return main(list(map(str, words)))


@pytest.mark.parametrize("name", SAME)
def test_folders_of_transformers_come_back_bit_equal(name, tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    torch.manual_seed(0)
    theirs = (
        COUNTERPARTS[name].build(small_model(PRESETS[name], COUNTERPARTS[name].small | {"vocab_size": 300})).bfloat16()
    )
    theirs.config.bos_token_id = theirs.generation_config.bos_token_id = 1
    theirs.save_pretrained(tmp_path / "in")
    train_bpe(["a b c " * 9], 300).save(tmp_path / "in")
    (tmp_path / "in" / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}", "bos_token": "!"}')
    assert run("import", "hf", tmp_path / "in", "--out", tmp_path / "run") == 0
    assert run("export", tmp_path / "run", "--to", "hf", tmp_path / "out") == 0
    before, after = (load_file(tmp_path / each / "model.safetensors") for each in ("in", "out"))
    assert before.keys() == after.keys()
    assert all(after[key].dtype == tensor.dtype for key, tensor in before.items())
    assert all(map(torch.equal, before.values(), (after[key] for key in before)))
    first, second = (transformers.AutoConfig.from_pretrained(tmp_path / each).to_dict() for each in ("in", "out"))
    different = {key for key in first | second if first.get(key) != second.get(key)}
    assert different <= {"_name_or_path", "use_cache"}
    generation = [transformers.GenerationConfig.from_pretrained(tmp_path / each).to_dict() for each in ("in", "out")]
    assert generation[0]["bos_token_id"] == generation[1]["bos_token_id"] == 1
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"


def test_gguf_files_become_runs_and_folders(tmp_path, capsys):
    tensors = llama(tmp_path / "m.gguf", gguf_files.vocabulary(), rows=300)
    assert run("import", "hf", tmp_path / "m.gguf", "--out", tmp_path / "run", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["model_type"], document["precision"]) == ("llama", "fp32")
    assert Tokenizer.load(tmp_path / "run").vocab_size == document["tokens"]
    with open_source(tmp_path / "run") as source:
        export(source, tmp_path / "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    settings = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert (settings["eos_token"], settings["chat_template"]) == ("<|end|>", "{{ messages }}")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == 0
    kept = json.loads((tmp_path / "run" / "hugging_face" / "config.json").read_text())
    assert (kept["max_position_embeddings"], kept["eos_token_id"]) == (32, 0)  # for runs on shorter samples

    half = tmp_path / "half"
    assert run("import", "hf", tmp_path / "m.gguf", "--out", half, "--layers", 1, "--precision", "bf16") == 0
    with open_source(half) as source:
        assert source.read("embed.weight").dtype == torch.bfloat16
        assert not [name for name in source.names() if name.startswith("blocks.1.")]
    assert run("import", "hf", tmp_path / "hf", "--out", tmp_path / "first", "--layers", 1) == 0
    with open_source(tmp_path / "first") as source:
        assert not [name for name in source.names() if name.startswith("blocks.1.")]


def test_gguf_files_without_a_tokenizer_that_is_read_become_runs_without_one(tmp_path, capsys):
    llama(tmp_path / "m.gguf", gguf_files.vocabulary() | {"tokenizer.ggml.model": "rwkv"})
    assert run("import", "hf", tmp_path / "m.gguf", "--out", tmp_path / "run") == 0
    assert "kind 'rwkv' is not read" in capsys.readouterr().err
    assert not (tmp_path / "run" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["m.gguf", "other.gguf"], 2, "a GGUF file is imported by itself"),
        (["m.gguf", "--layers", "3"], 2, "m.gguf has 2 layers"),
        (["cut.gguf"], 4, "cut.gguf is no whole GGUF file"),
        (["big.gguf"], 4, "big.gguf: the tokenizer has 260 tokens, the embedding has 64 rows"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_left(words, code, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    llama(tmp_path / "m.gguf")
    llama(tmp_path / "big.gguf", gguf_files.vocabulary())
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[:-1000])
    before = sorted(tmp_path.iterdir())
    assert run("import", "hf", *words, "--out", "run") == code
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
