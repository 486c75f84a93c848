"""GGUF files: what is read, and what damaged, hostile and unknown ones get."""

import json
import struct
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf")

from exchange import gguf_files  # noqa: E402
from phalanx.data.token_table import KINDS, definition_of, settings_of  # noqa: E402
from phalanx.data.tokenizer import LibraryTokenizer  # noqa: E402
from phalanx.errors import CheckpointError, DamagedCheckpointError, DataError, NotFoundError  # noqa: E402
from phalanx.exchange.gguf import (  # noqa: E402
    GgufFile,
    GgufModel,
    exact_decimal,
)
from phalanx.model.transformer import Transformer  # noqa: E402

CONFIG = SimpleNamespace(
    model_type="llama",
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_theta": 1e5},
    tie_word_embeddings=True,
)
NORM, MATRIX = (64,), (64, 64)


def llama(path, metadata=None, quantised=None, change=lambda tensors: None, rows=64):
    """Writes a small Llama with random tensors and a vocabulary of `rows`."""
    shapes = {"model.embed_tokens.weight": (rows, 64), "model.norm.weight": NORM}
    for layer in range(2):
        attention = {"q": MATRIX, "k": (32, 64), "v": (32, 64), "o": MATRIX}
        shapes |= {f"model.layers.{layer}.self_attn.{each}_proj.weight": shape for each, shape in attention.items()}
        shapes |= {f"model.layers.{layer}.mlp.{each}_proj.weight": (96, 64) for each in ("gate", "up")}
        shapes[f"model.layers.{layer}.mlp.down_proj.weight"] = (64, 96)
        shapes |= {f"model.layers.{layer}.{each}_layernorm.weight": NORM for each in ("input", "post_attention")}
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    change(tensors)
    gguf_files.write(path, SimpleNamespace(state_dict=lambda: tensors), CONFIG, metadata, quantised)
    return tensors


def test_parameters_are_those_that_were_written(tmp_path):
    tensors = llama(tmp_path / "m.gguf")
    model = GgufModel(tmp_path / "m.gguf")
    assert model.model.norm_eps == 1e-5  # not 9.999999747378752e-06
    assert model.model.tied
    assert model.shapes == {name: tuple(each.shape) for name, each in Transformer(model.model).named_parameters()}
    for ours, theirs in {"q": "wq", "k": "wk", "o": "wo"}.items():
        wanted = tensors[f"model.layers.1.self_attn.{ours}_proj.weight"]
        assert torch.equal(model.read(f"blocks.1.attn.{theirs}.weight"), wanted)
    assert torch.equal(model.read("embed.weight"), tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_tensors_are_near(kind, tmp_path):
    kind = gguf.GGMLQuantizationType[kind]
    tensors = llama(tmp_path / "m.gguf", quantised=kind)
    found, wanted = GgufModel(tmp_path / "m.gguf").read("embed.weight"), tensors["model.embed_tokens.weight"]
    assert torch.equal(found, torch.from_numpy(gguf.dequantize(gguf.quantize(wanted.numpy(), kind), kind)))
    assert (found - wanted).abs().max() < 0.4


def test_k_quants_are_those_of_the_library(tmp_path):
    """The library cannot write them: their bytes are drawn."""
    kind = gguf.GGMLQuantizationType.Q4_K
    stored = np.random.default_rng(0).integers(0, 255, (64, 144), dtype=np.uint8)
    stored[:, [1, 3]] = 0x30  # the scales are finite
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("token_embd.weight", stored, raw_dtype=kind)
    for each in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        each()
    found = GgufFile(tmp_path / "m.gguf").read("token_embd.weight")
    assert torch.equal(found, torch.from_numpy(gguf.dequantize(stored, kind)))
    assert found.shape == (64, 256)


def test_llama_3_positions_come_from_their_divisors(tmp_path):
    frequencies = 1e5 ** -(torch.arange(0, 16, 2) / 16)
    turns = 8192 * frequencies / (2 * torch.pi)
    kept = ((turns - 1) / 3).clamp(0, 1)
    divisors = 1 / (kept + (1 - kept) / 8)
    _with_tensor(tmp_path / "m.gguf", "rope_freqs.weight", divisors)
    scaling = GgufModel(tmp_path / "m.gguf").model.rope_scaling
    assert (scaling.kind, scaling.factor, scaling.original_seq_len) == ("llama3", 8, 8192)
    _with_tensor(tmp_path / "n.gguf", "rope_freqs.weight", torch.linspace(1, 8, 8))
    with pytest.raises(CheckpointError, match="rope_freqs.weight are not those of Llama 3.1"):
        GgufModel(tmp_path / "n.gguf")


def test_positions_that_older_files_stretch_without_a_kind(tmp_path):
    for name in ("rope.scale_linear", "rope.scaling.factor"):
        llama(tmp_path / "m.gguf", {name: 4.0})
        scaling = GgufModel(tmp_path / "m.gguf").model.rope_scaling
        assert (scaling.kind, scaling.factor) == ("linear", 4)
    llama(tmp_path / "m.gguf", {"rope.scaling.type": "none", "rope.scaling.factor": 4.0})
    assert GgufModel(tmp_path / "m.gguf").model.rope_scaling.factor == 1


def _with_tensor(path, name, values):
    real = gguf.get_tensor_name_map

    class Names:
        def __init__(self, *arguments):
            self.names = real(*arguments)

        def get_name(self, stem):
            return self.names.get_name(stem) or stem

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "get_tensor_name_map", Names)
        llama(path, change=lambda tensors: tensors.update({name: values}))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}, "rope.scaling.type is 'longrope'"),
        ({"attention.clamp_kqv": 8.0}, "llama.attention.clamp_kqv is not understood"),
        ({"block_count": 3}, "blk.2.attn_norm.weight is missing"),
        ({"block_count": 1}, "blk.1.attn_k.weight is not understood"),
        ({"block_count": 2**31}, r"model.n_layers: must be at most 1,?024"),
        ({"block_count": "two"}, "llama.block_count is two, expected one int"),
        ({"attention.head_count": 0}, "model.n_heads"),
        ({"attention.head_count_kv": [2, 1]}, r"head_count_kv is \[2, 1\], expected one int for all layers"),
        ({"feed_forward_length": 64}, r"ffn_up.weight is \[96, 64\], and blocks.0.mlp.up.weight needs \[64, 64\]"),
        ({"split.count": 2}, "one of 2 parts; merge them first"),
        ({"split.count": "two"}, "one of two parts"),
        ({"general.type": "adapter"}, "general.type is 'adapter', and a model is read"),
        ({"vocab_size": 50}, "llama.vocab_size is 50, and token_embd.weight has 64 rows"),
    ],
)
def test_what_is_not_understood_is_named(metadata, message, tmp_path):
    llama(tmp_path / "m.gguf", metadata)
    with pytest.raises(CheckpointError, match=message):
        GgufModel(tmp_path / "m.gguf")


def test_unknown_architectures_are_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "lama")
    for each in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        each()
    with pytest.raises(CheckpointError, match="architecture 'lama' is not read; did you mean llama?"):
        GgufModel(tmp_path / "m.gguf")


def test_damaged_files_are_refused(tmp_path):
    llama(tmp_path / "m.gguf", gguf_files.vocabulary())
    whole = (tmp_path / "m.gguf").read_bytes()
    for end in (0, 3, 20, 100, 1000, len(whole) - 4000):
        (tmp_path / "cut.gguf").write_bytes(whole[:end])
        with pytest.raises(DamagedCheckpointError, match=r"cut\.gguf"):
            GgufModel(tmp_path / "cut.gguf")
    for position in range(4, 3000, 13):  # whatever a flipped byte means, the answer is an error of ours or a model
        (tmp_path / "flipped.gguf").write_bytes(
            whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :]
        )
        try:
            model = GgufModel(tmp_path / "flipped.gguf")
            model.read("embed.weight")
            definition_of(model.file.metadata, model.file.path)
        except (CheckpointError, DataError):
            pass


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGML" + bytes(40), "does not begin with GGUF"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**60), "states 1,152,921,504,606,846,976 values"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 2**60, 0), "states 1,152,921,504,606,846,976 tensors"),
        (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 2**63) + bytes(20), "ends within its header"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 8, 2**40) + bytes(20), "texts of 'k'"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 9, 2) + bytes(20), "list of the unknown type 9"),
        (struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), "version 1"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "big-endian"),
        (struct.pack("<4sIQQQ1sIQQIQ", b"GGUF", 3, 1, 0, 1, b"t", 2, 2**40, 2**40, 0, 0), "bytes after the file"),
    ],
)
def test_hostile_headers_are_refused(content, message, tmp_path):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        GgufFile(tmp_path / "m.gguf")


def test_missing_files_and_folders_are_refused(tmp_path):
    with pytest.raises(DamagedCheckpointError, match="cannot be read"):
        GgufFile(tmp_path)
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(NotFoundError, match=r"there is no such file; did you mean .*model-q4\.gguf"):
        GgufFile(tmp_path / "modle-q4.gguf")


def test_the_tokenizer_is_that_of_the_metadata(tmp_path):
    metadata = gguf_files.vocabulary()
    tokenizer = LibraryTokenizer(definition_of(metadata, tmp_path), "it")
    text = "in the 12 heaths: <|end|>\n\n  \u00fc"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    names = [metadata["tokenizer.ggml.tokens"][each] for each in ids]
    assert names[:6] == ["i", "n", "Ġthe", "Ġ", "1", "2"]  # smollm: digits one by one
    assert tokenizer.separator == tuple(tokenizer.encode("\n"))  # none of the known ends of texts
    assert settings_of(metadata)["eos_token"] == "<|end|>"
    assert settings_of(metadata)["chat_template"] == "{{ messages }}"
    several = settings_of(metadata | {"tokenizer.chat_template.tool_use": "{{ tools }}"})["chat_template"]
    assert [each["name"] for each in several] == ["default", "tool_use"]
    assert '"TemplateProcessing"' not in definition_of(metadata, tmp_path)
    begun = metadata | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 0}
    assert json.loads(definition_of(begun, tmp_path))["post_processor"]["type"] == "TemplateProcessing"
    LibraryTokenizer(definition_of(begun, tmp_path), "it")


@pytest.mark.parametrize("pre", KINDS)
def test_every_kind_of_splitting_loads(pre, tmp_path):
    tokenizer = LibraryTokenizer(definition_of(gguf_files.vocabulary() | {"tokenizer.ggml.pre": pre}, tmp_path), "it")
    for text in ("It's the 1234 a\n\nb", "HTTPServer(x)  // \u4f60\u597d\u3053 9 \u00e9"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


TEXTS = ["hello the", "  hello\n\nother, the  end", "thehello w\u00f6rld \u4f60", "", " ", "hellollo.er</s>"]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_merges_by_score(prefix, tmp_path):
    """As llama.cpp does: of all neighbours that make a token, the first pair with the highest score."""
    metadata = gguf_files.pieces() | {"tokenizer.ggml.add_space_prefix": prefix}
    tokenizer = LibraryTokenizer(definition_of(metadata, tmp_path), "it")
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids.tolist() == [number for part in _parts(text) for number in _merged(part, metadata, prefix)]
        assert tokenizer.decode(ids) == text or "\n\n" in text
    [(ids, _)] = tokenizer.encode_marked([[("hello</s>", False)]])
    assert ids[-1] == tokenizer.separator[0] == 2
    assert json.loads(definition_of(metadata, tmp_path))["post_processor"]["type"] == "TemplateProcessing"
    assert settings_of(metadata)["add_bos_token"] is True


def _parts(text):
    """Returns the text cut at the user's token."""
    return [part for each in text.partition("\n\n") if (part := each)]


def _merged(text, metadata, prefix):
    tokens = metadata["tokenizer.ggml.tokens"]
    score = {
        token: metadata["tokenizer.ggml.scores"][number]
        for number, token in enumerate(tokens)
        if metadata["tokenizer.ggml.token_type"][number] == 1
    }
    if text == "\n\n":
        return [tokens.index(text)]
    symbols = list((" " * prefix + text).replace(" ", "\u2581"))
    while found := [(-score[a + b], n) for n, (a, b) in enumerate(pairwise(symbols)) if a + b in score]:
        _, place = min(found)
        symbols[place : place + 2] = ["".join(symbols[place : place + 2])]
    return [
        number
        for symbol in symbols
        for number in ([tokens.index(symbol)] if symbol in score else [3 + byte for byte in symbol.encode()])
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "kind 't5' is not read, only 'gpt2'"),
        ({"tokenizer.ggml.model": "llama"}, "scores is missing"),
        ({"tokenizer.ggml.model": None}, "has no tokenizer"),
        ({"tokenizer.ggml.pre": "unheard"}, "is 'unheard'; known: gpt-2, smollm"),
        (
            {"tokenizer.ggml.pre": None, "general.architecture": "llama"},
            "pre is missing, as in files of before May 2024",
        ),
        ({"tokenizer.ggml.merges": ["h e l"]}, "the merge 'h e l'"),
        ({"tokenizer.ggml.merges": ["h h"]}, "the merge 'h h' is not of two tokens"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "some of its 2 tokens occur twice"),
        ({"tokenizer.ggml.tokens": 5}, "is no list of texts"),
        ({"tokenizer.ggml.eos_token_id": 5000}, "eos_token_id is 5000, and it has 260 tokens"),
        ({"tokenizer.ggml.bos_token_id": "<s>"}, "bos_token_id is '<s>', and it has 260 tokens"),
    ],
)
def test_other_tokenizers_are_refused(change, message, tmp_path):
    with pytest.raises(DataError, match=message):
        definition_of(gguf_files.vocabulary() | change, tmp_path)


def test_decimals_are_those_that_were_meant():
    assert exact_decimal(struct.unpack("<f", struct.pack("<f", 1e-6))[0]) == 1e-6
