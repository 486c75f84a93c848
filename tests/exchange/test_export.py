"""Exported runs: transformers loads the very weights, computes the same logits, and writes the same text."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from families.counterparts import COUNTERPARTS, InFloat64, small_model
from generate.texts import generate
from generate.written import write_run
from model.kinds import build
from phalanx.check.load import as_dict
from phalanx.checkpoint.consolidated import open_source
from phalanx.checkpoint.save import save_tensors
from phalanx.cli.main import main
from phalanx.config.job import Job, Train
from phalanx.config.model import LoRA, ModelConfig
from phalanx.config.presets import PRESETS
from phalanx.data.tokenizer import ByteTokenizer, CharTokenizer, LibraryTokenizer, Tokenizer, train_bpe
from phalanx.errors import CheckpointError, JobError
from phalanx.exchange.export import export, library_definition

LLAMA = replace(small_model(PRESETS["llama3.1-8b"], {"rope_scaling": {"original_seq_len": 16}}), seq_len=64)


TYPICAL = ("llama3.1-8b", "mixtral-8x7b", "gemma3-27b", "gpt2", "gpt-neox-20b", "deepseek-v3")
"""Families with every kind of conversion; `make test-families` exports all."""


def export_run(run: Path, target: Path, **options):
    with open_source(run) as source:
        return export(source, target, **options)


def write(path: Path, model: ModelConfig = LLAMA, tokenizer: Tokenizer | None = None, precision="fp32", master=False):
    """Writes a run in a type, with master weights in fp32 or without. Returns the model in that type."""
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    transformer = build(model)
    state = {name: tensor.detach().to(kind) for name, tensor in transformer.named_parameters()}
    if master:
        state |= {f"master/{name}": tensor.detach().float() for name, tensor in transformer.named_parameters()}
    job = Job(model=model, train=Train(precision=precision))
    save_tensors(path / "checkpoints", 7, state, {"job": as_dict(job), "vocab_size": model.vocab_size})
    (path / "config.yaml").touch()
    if tokenizer:
        tokenizer.save(path)
    return transformer.to(kind)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", COUNTERPARTS if os.environ.get("PHALANX_FAMILIES") else TYPICAL)
def test_transformers_computes_the_same_logits(name, tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    model = small_model(PRESETS[name], COUNTERPARTS[name].small)
    ours = write_run(tmp_path / "run", model)
    done = export_run(tmp_path / "run", tmp_path / "hf")
    options = {"attn_implementation": "eager", "experts_implementation": "eager" if model.moe.n_experts else None}
    tokens = torch.randint(model.vocab_size, (2, model.seq_len), generator=torch.Generator().manual_seed(1))
    with InFloat64(), torch.no_grad():
        torch.set_default_dtype(torch.float64)
        try:
            theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
                tmp_path / "hf", dtype="auto", output_loading_info=True, **options
            )
        finally:
            torch.set_default_dtype(torch.float32)
        expected = theirs.eval()(tokens, use_cache=False).logits
    assert not any(info.values()), info
    assert expected.dtype == torch.float64
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=1e-9)
    assert done.tensors == len(tensors_in(tmp_path / "hf"))


def test_transformers_writes_the_same_text(tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    tokenizer = train_bpe(["the cat sat on the mat. " * 20], 280)
    model = replace(LLAMA, vocab_size=tokenizer.vocab_size)
    ours = write(tmp_path / "run", model, tokenizer)
    assert main(["export", str(tmp_path / "run"), "--to", "hf", str(tmp_path / "hf")]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    reader = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "the mat, caté 12\n"
    assert reader(text)["input_ids"] == tokenizer.encode(text).tolist()
    assert reader.decode(reader(text)["input_ids"]) == text
    assert theirs.generation_config.eos_token_id == reader.eos_token_id == tokenizer.separator[0]
    state = theirs.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors_in(tmp_path / "hf").items())
    prompt = torch.from_numpy(tokenizer.encode(text))[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(prompt), theirs(prompt).logits, rtol=0, atol=2e-5)
    found = theirs.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(found, generate(ours, prompt, max_new_tokens=20, temperature=0))


@pytest.mark.parametrize("unknown", [False, True])
def test_characters_and_bytes_become_tokenizers_of_the_library(unknown):
    characters = CharTokenizer("\n abcdé", unknown)
    for ours, text in ((characters, "ab\n\ncé d"), (ByteTokenizer(), "Héllo\n 你\x00\x7f\xad<|endoftext|>")):
        library = LibraryTokenizer(library_definition(ours) or "", "it")
        assert library.encode(text).tolist() == ours.encode(text).tolist()
        assert library.decode(library.encode(text)) == text
        assert library.vocab_size == ours.vocab_size
    if unknown:
        assert LibraryTokenizer(library_definition(characters) or "", "it").encode("azb").tolist() == [2, 7, 3]


def test_weights_are_those_of_the_checkpoint_in_any_type_and_number_of_files(tmp_path):
    ours = write(tmp_path / "run", precision="bf16", master=True)
    export_run(tmp_path / "run", tmp_path / "same")
    name = "model.layers.1.self_attn.q_proj.weight"
    own = dict(ours.named_parameters())["blocks.1.attn.wq.weight"]
    assert torch.equal(tensors_in(tmp_path / "same")[name], own)
    done = export_run(tmp_path / "run", tmp_path / "wide", dtype="fp32", most_file_bytes=20_000)
    files = sorted(file for file in done.files if file.endswith(".safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "wide" / "model.safetensors.index.json").read_text())
    wide = tensors_in(tmp_path / "wide")
    assert index["weight_map"].keys() == wide.keys()
    assert index["metadata"]["total_size"] == done.bytes
    assert not torch.equal(wide[name], own.float())  # the master weights, not what was rounded
    assert torch.equal(wide[name].bfloat16(), own)
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"
    assert json.loads((tmp_path / "same" / "config.json").read_text())["dtype"] == "bfloat16"


def test_what_an_import_left_is_carried_over(tmp_path):
    write(tmp_path / "run", tokenizer=train_bpe(["abc " * 9], 260))
    kept = tmp_path / "run" / "hugging_face"
    kept.mkdir()
    for name, content in {
        "config.json": {"bos_token_id": 3, "attention_dropout": 0.1, "max_position_embeddings": 8192}
        | {"auto_map": {"AutoModel": "code.py"}, "torch_dtype": "float16", "hidden_size": 7},
        "tokenizer_config.json": {"chat_template": "{{ messages }}", "eos_token": "c"},
        "generation_config.json": {"temperature": 0.6, "eos_token_id": 2},
    }.items():
        (kept / name).write_text(json.dumps(content))
    (kept / "chat_template.jinja").write_text("{{ messages }}")
    export_run(tmp_path / "run", tmp_path / "hf")
    config, tokens, generation = (
        json.loads((tmp_path / "hf" / name).read_text())
        for name in ("config.json", "tokenizer_config.json", "generation_config.json")
    )
    assert (config["bos_token_id"], config["eos_token_id"], config["attention_dropout"]) == (3, 2, 0.1)
    assert (config["max_position_embeddings"], config["hidden_size"]) == (8192, LLAMA.d_model)
    assert not {"auto_map", "torch_dtype"} & config.keys()
    assert (tokens["eos_token"], tokens["model_max_length"]) == ("c", 8192)
    assert "chat_template" not in tokens  # it stands in a file of its own
    assert (generation["temperature"], generation["eos_token_id"], generation["bos_token_id"]) == (0.6, 2, 3)
    assert (tmp_path / "hf" / "chat_template.jinja").read_text() == "{{ messages }}"
    (tmp_path / "run" / "chat_template.jinja").write_text("of the fine-tuned run")
    (tmp_path / "run" / "tokenizer_config.json").write_text('{"eos_token": "b"}')
    export_run(tmp_path / "run", tmp_path / "tuned")
    assert (tmp_path / "tuned" / "chat_template.jinja").read_text() == "of the fine-tuned run"
    assert json.loads((tmp_path / "tuned" / "tokenizer_config.json").read_text())["eos_token"] == "b"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (replace(LLAMA, sinks=True), "sinks"),
        (replace(LLAMA, norm_place="both"), "norm_place"),
        (replace(LLAMA, positions="learned"), "positions"),
    ],
)
def test_what_transformers_cannot_express_is_named(model, message, tmp_path):
    write(tmp_path / "run", model)
    with pytest.raises(JobError, match=message):
        export_run(tmp_path / "run", tmp_path / "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_nothing_is_overwritten_and_nothing_half_is_left(tmp_path, monkeypatch, capsys):
    write(tmp_path / "run")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "mine").touch()
    assert main(["export", str(tmp_path / "run"), "--to", "hf", str(tmp_path / "hf")]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    (tmp_path / "hf" / "mine").unlink()
    with monkeypatch.context() as patch:
        patch.setattr("phalanx.exchange.export._card", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            export_run(tmp_path / "run", tmp_path / "hf")
    assert not list((tmp_path / "hf").iterdir())
    assert len(list(tmp_path.iterdir())) == 2
    assert main(["export", str(tmp_path / "run"), "--to", "hf", str(tmp_path / "hf"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["model_type"] == "llama"
    assert document["notes"]  # no tokenizer
    assert set(document["files"]) == {path.name for path in (tmp_path / "hf").iterdir()}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["RUN", "DIR"], "needs --to hf"),
        (["RUN", "--to", "hf"], "takes RUN and DIR, found"),
        (["RUN", "DIR", "--to", "gguf"], "--to"),
        (["RUN", "DIR", "--to", "hf", "--precison", "bf16"], "did you mean --precision"),
        (["RUN", "DIR", "--to", "hf", "--max-shard-size", "5 apples"], "expected bytes such as 5GB"),
        (["RUN", "RUN/config.yaml/DIR", "--to", "hf"], "RUN/config.yaml is no folder"),
    ],
)
def test_wrong_words_are_named(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "RUN")
    assert main(["export", *words]) == 2
    assert message in capsys.readouterr().err


def test_what_is_no_run_is_refused(tmp_path):
    export_once = write(tmp_path / "run")
    assert export_once
    export_run(tmp_path / "run", tmp_path / "hf")
    with pytest.raises(CheckpointError, match="has no job"):
        export_run(tmp_path / "hf", tmp_path / "again")
    with pytest.raises(CheckpointError):
        export_run(tmp_path / "absent", tmp_path / "again")


def test_adapters_are_merged_into_their_matrices(tmp_path):
    adapted = replace(LLAMA, lora=LoRA(rank=2, alpha=4.0, targets="wq,down"))
    ours = write(tmp_path / "run", adapted)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            assert "lora" not in name or parameter.any(), name
    export_run(tmp_path / "run", tmp_path / "hf")
    found = tensors_in(tmp_path / "hf")
    assert not [name for name in found if "lora" in name]
    values = dict(ours.named_parameters())
    attention = "blocks.1.attn.wq"
    a, b = (
        next(tensor for name, tensor in values.items() if name.startswith(f"{attention}.lora_{part}")) for part in "ab"
    )
    expected = values[f"{attention}.weight"] + 2 * b @ a
    torch.testing.assert_close(found["model.layers.1.self_attn.q_proj.weight"], expected.detach())
