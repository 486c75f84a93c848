"""Exported runs: transformers loads the very weights and writes the same text, and imports are exported again."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoint.contents import save_tensors
from exchange import gguf_files
from exchange.test_gguf import llama
from families.counterparts import COUNTERPARTS, small_model
from generate.texts import generate
from generate.written import write_run
from model.kinds import build
from phalanx.blocks.parameters import parameter_shapes
from phalanx.check.load import as_dict
from phalanx.checkpoint.consolidated import open_source
from phalanx.cli.main import main
from phalanx.config.corpora import BUILT_IN
from phalanx.config.hugging_face.families import TRAINED_FAMILIES
from phalanx.config.job import Job, Train
from phalanx.config.model import LoRA, ModelConfig
from phalanx.config.presets import PRESETS
from phalanx.data.tokenizer import ByteTokenizer, CharTokenizer, LibraryTokenizer, Tokenizer, train_bpe
from phalanx.errors import CheckpointError, JobError
from phalanx.exchange.export import export, library_definition
from phalanx.exchange.hugging_face import WEIGHTS
from phalanx.exchange.links import links, shapes_of_theirs
from phalanx.verify.exchange import InFloat64

# Exported runs: transformers loads the very weights, computes the same logits, and writes the same text.


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
        theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "hf", dtype="auto", output_loading_info=True, **options
        )
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


def test_texts_of_a_run_on_conversations_end_as_its_answers_do(tmp_path):
    """In transformers, which stops at tokens of generation_config.json alone; here `generate --chat` does."""
    plain = train_bpe(["the cat sat on the mat. " * 20], 280)
    stored = json.loads(plain.definition())
    token = stored["added_tokens"][0] | {"id": plain.vocab_size, "content": "<|im_end|>"}
    stored["added_tokens"].append(token)
    tokenizer = LibraryTokenizer(json.dumps(stored), "theirs")
    model = replace(LLAMA, vocab_size=tokenizer.vocab_size)
    for name, own, imported, ends in (
        ("scratch", tokenizer, None, [0, plain.vocab_size]),
        ("list", tokenizer, [3, plain.vocab_size], [3, plain.vocab_size]),
        ("base", tokenizer, 3, [3, plain.vocab_size]),
        ("plain", plain, 3, 3),
    ):
        run = tmp_path / name
        write(run, model, own)
        (run / "chat_template.jinja").write_text(BUILT_IN["chatml"].jinja)
        if imported is not None:
            (run / "hugging_face").mkdir()
            (run / "hugging_face" / "generation_config.json").write_text(json.dumps({"eos_token_id": imported}))
        done = export_run(run, tmp_path / f"hf-{name}")
        assert json.loads((tmp_path / f"hf-{name}" / "generation_config.json").read_text())["eos_token_id"] == ends
        assert any("answers end with '<|im_end|>', which is no token" in note for note in done.notes) == (own is plain)


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
        "config.json": {"model_type": "gpt2", "bos_token_id": 3, "attention_dropout": 0.1}
        | {"auto_map": {"AutoModel": "code.py"}, "torch_dtype": "float16", "hidden_size": 7}
        | {"max_position_embeddings": 8192},
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
    assert config["model_type"] == "llama"  # by now: gpt2 does not say all of it
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


# Import, then export: folders and files of other programs, imported as runs and exported.

SAME = ("llama3.1-8b", "qwen2.5-7b", "mixtral-8x7b", "gpt2", "gpt-neox-20b", "phi3-mini")  # the last is also a mistral


def run(*words: object) -> int:
    return main(list(map(str, words)))


@pytest.mark.parametrize("name", SAME)
def test_folders_of_transformers_come_back_bit_equal(name, tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    torch.manual_seed(0)
    theirs = (
        COUNTERPARTS[name].build(small_model(PRESETS[name], COUNTERPARTS[name].small | {"vocab_size": 300})).bfloat16()
    )
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
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


# Names and conversions of weights: every parameter has one counterpart, and every conversion an exact inverse.


def test_every_model_type_has_a_table_of_weights():
    assert {family.model_type for family in TRAINED_FAMILIES} == set(WEIGHTS)


@pytest.mark.parametrize("name", COUNTERPARTS)
def test_conversions_are_exact_in_both_directions(name: str):
    family = WEIGHTS[COUNTERPARTS[name].model_type]
    model = small_model(PRESETS[name], COUNTERPARTS[name].small)
    shapes = parameter_shapes(model)
    generator = torch.Generator().manual_seed(0)
    found: list[str] = []
    for link in links(model, family):
        ours = [torch.randint(-9, 9, shapes[each], generator=generator).double() for each in link.ours]
        theirs = link.conversion.theirs(ours, model)
        expected = shapes_of_theirs(link, model, shapes)
        assert [tuple(each.shape) for each in theirs] == [expected[each] for each in link.theirs]
        again = link.conversion.ours(theirs, model)
        assert all(map(torch.equal, again, ours))
        found += link.ours
        assert all(family.name_of(each) == each and family.needs(each, model) for each in link.theirs)
    assert sorted(found) == sorted(shapes)
    names = [name for link in links(model, family) for name in link.theirs]
    assert len({*names}) == len(names)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_a_norm_gets_its_one_in_fp64_and_comes_back_whole(kind):
    link = next(
        link
        for link in links(PRESETS["gemma2-2b"], WEIGHTS["gemma2"])
        if link.theirs[0] == "model.layers.0.input_layernorm.weight"
    )
    stored = torch.tensor([0.001, -1.5, 1e-7], dtype=kind)
    ours = link.conversion.ours([stored], PRESETS["gemma2-2b"])
    assert ours[0].dtype == torch.float64
    assert torch.equal(link.conversion.theirs(ours, PRESETS["gemma2-2b"])[0].to(kind), stored)


@pytest.mark.parametrize(
    ("model_type", "stored", "name"),
    [
        ("gpt2", "h.0.attn.c_attn.weight", "transformer.h.0.attn.c_attn.weight"),
        ("gpt2", "transformer.h.0.ln_1.bias", "transformer.h.0.ln_1.bias"),
        ("llama", "layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("gpt_neox", "lm_head.weight", "embed_out.weight"),
        ("gemma3_text", "language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("gemma3_text", "model.language_model.norm.weight", "model.norm.weight"),
    ],
)
def test_other_spellings_of_names(model_type: str, stored: str, name: str):
    assert WEIGHTS[model_type].name_of(stored) == name


@pytest.mark.parametrize(
    ("preset", "model_type", "name", "needed"),
    [
        ("gpt2", "gpt2", "transformer.h.0.attn.bias", False),
        ("gpt2", "gpt2", "lm_head.weight", False),
        ("gpt2", "gpt2", "transformer.h.0.attn.c_attn.bias", True),
        ("llama3-8b", "llama", "lm_head.weight", True),
        ("llama3-8b", "llama", "model.layers.0.self_attn.rotary_emb.inv_freq", False),
        ("deepseek-v3", "deepseek_v3", "model.layers.61.eh_proj.weight", False),
        ("deepseek-v3", "deepseek_v3", "model.layers.60.eh_proj.weight", True),
    ],
)
def test_tensors_without_use_are_known(preset: str, model_type: str, name: str, needed: bool):
    assert WEIGHTS[model_type].needs(name, PRESETS[preset]) == needed


def test_parameters_without_a_counterpart_are_named():
    with pytest.raises(JobError, match=r"blocks\.0\.attn\.q_norm\.weight"):
        list(links(PRESETS["qwen3-8b"], WEIGHTS["llama"]))
