"""Imports of Hugging Face folders: the parameters bit for bit, and one message for everything that does not fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from exchange.folders import LLAMA, VOCABULARY, begin_texts, write_folder, write_tensors
from phalanx.checkpoint.inventory import damage
from phalanx.checkpoint.manifest import job_of
from phalanx.checkpoint.shard_file import Reader
from phalanx.cli.main import main
from phalanx.data.tokenizer import Tokenizer
from phalanx.errors import CheckpointError, DataError, JobError, PhalanxError, RunError
from phalanx.exchange import folder as hub
from phalanx.exchange import import_run
from phalanx.exchange.import_run import import_folder
from phalanx.generate.load import load_run, tokenizer_of
from phalanx.train.run_directory import RunDirectory

# Imports of Hugging Face folders: the parameters bit for bit, and one message for everything that does not fit.


EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "theirs"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "ours"


@pytest.fixture(autouse=True)
def runs(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


@pytest.mark.parametrize("files", [1, 3])
def test_an_imported_run_has_the_same_parameters(folder: Path, out: Path, files: int):
    model = write_folder(folder, files=files)
    done = import_folder([folder], out)
    assert (done.model_type, done.precision, done.parameters) == ("llama", "fp64", sum(map(_numel, model.parameters())))
    assert done.notes == (
        f"the embedding has {VOCABULARY - done.tokens} rows more than the tokenizer's {done.tokens} tokens: padding",
    )
    manifest = RunDirectory(out).checkpoint()
    assert not damage(manifest.path, lambda _: None)
    with Reader(manifest) as reader:
        for name, parameter in model.named_parameters():
            assert torch.equal(reader.read(name), parameter)
    loaded = load_run(out, device="cpu")
    assert loaded.text("hello", max_new_tokens=3).startswith("hello")
    assert sorted(path.name for path in out.iterdir()) == [
        "checkpoints", "config.yaml", "hugging_face", "latest", "tokenizer.json",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_texts_end_with_the_tokens_that_the_folder_names(folder: Path, out: Path, name: str):
    """Those of GLM, such as <|user|>, are no end-of-text tokens of others."""
    write_folder(folder)
    config = json.loads((folder / "config.json").read_text())
    for ends in (7, [7, 9]):
        (folder / name).write_text(json.dumps(config | {"eos_token_id": ends}))
        import_folder([folder], out.with_name(f"ours{ends}"))
        found = load_run(out.with_name(f"ours{ends}"), device="cpu").tokenizer.end_ids
        assert found == (0, 7, 9)[: 2 + isinstance(ends, list)]


def test_prompts_begin_as_the_tokenizer_begins_texts(folder: Path, out: Path):
    """As in transformers and vLLM. What was trained here has learned no such beginning."""
    write_folder(folder)
    begin_texts(folder)
    import_folder([folder], out)
    loaded = load_run(out, device="cpu")
    plain = Tokenizer.load(out).encode("hello").tolist()
    assert loaded.encode("hello") == [0, *plain]
    assert loaded.text("hello", max_new_tokens=1).startswith("hello")
    with pytest.raises(JobError, match="the prompt is empty"):
        loaded.encode("")
    imported = RunDirectory(out).checkpoint()
    trained = replace(imported, meta={"vocab_size": imported.meta["vocab_size"]})
    for source, begins in (("", False), ("{{ messages[0].content }}", False), ("{{ bos_token }}", True)):
        if source:
            (out / "chat_template.jinja").write_text(source)
        assert tokenizer_of(out, trained).prompt("hello") == [*[0] * begins, *plain]


def _numel(tensor: torch.Tensor) -> int:
    return tensor.numel()


def test_files_may_be_named_themselves(folder: Path, out: Path):
    write_folder(folder, files=2)
    import_folder([*sorted(folder.glob("*.safetensors")), folder / "tokenizer.json"], out)
    assert (out / "tokenizer.json").is_file()


def test_only_the_files_of_the_index_are_read(folder: Path, out: Path):
    """Mistral's folders also hold consolidated.safetensors."""
    write_folder(folder, files=2)
    save_file({"tok_embeddings.weight": torch.zeros(2)}, folder / "consolidated.safetensors")
    import_folder([folder], out)


@pytest.mark.parametrize(("precision", "stored"), [("bf16", "BF16"), ("fp16", "F16"), ("fp32", "F32")])
def test_weights_are_converted(folder: Path, out: Path, precision: str, stored: str):
    write_folder(folder)
    assert import_folder([folder], out, precision=precision).precision == precision
    manifest = RunDirectory(out).checkpoint()
    assert {tensor.dtype for tensor in manifest.tensors.values()} == {stored}
    assert job_of(manifest).train.precision == precision


def test_weights_beyond_the_range_of_a_type_are_named(folder: Path, out: Path):
    write_folder(folder)
    _with(folder, **{EMBEDDING: torch.full((300, 32), 1e5, dtype=torch.float64)})
    with pytest.raises(CheckpointError, match="tensor .*embed_tokens.weight exceeds the range of fp16"):
        import_folder([folder], out, precision="fp16")
    assert not list(out.parent.iterdir())


def test_each_tensor_keeps_its_type(folder: Path, out: Path):
    write_folder(folder)
    tensors = load_file(folder / "model.safetensors")
    write_tensors(folder, {name: t.float() if "norm" in name else t.bfloat16() for name, t in tensors.items()})
    assert import_folder([folder], out).precision == "bf16"
    types = {name: tensor.dtype for name, tensor in RunDirectory(out).checkpoint().tensors.items()}
    assert types["final_norm.weight"] == "F32"
    assert types["head.weight"] == "BF16"


def _without(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    write_tensors(folder, tensors)


def _with(folder: Path, **more: torch.Tensor) -> None:
    write_tensors(folder, load_file(folder / "model.safetensors") | more)


def _config(folder: Path, **change: object) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | change))


def _cut(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _beside(folder: Path) -> None:
    (folder / "other.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    _index(folder, {"weight_map": {"a": "other.safetensors"}})


def _index(folder: Path, value: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(value))


def _pipe(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


BAD = {
    "missing": (lambda f: _without(f, EMBEDDING), r"tensor model.embed_tokens.weight \(300, 32\) is missing"),
    "surplus": (lambda f: _with(f, extra=torch.zeros(3)), r"model.safetensors: tensor extra \(3,\) belongs to no"),
    "shape": (
        lambda f: _with(f, **{EMBEDDING: torch.zeros(7, 32)}),
        r"model.safetensors: tensor model.embed_tokens.weight is \(7, 32\) there, \(300, 32\) by config.json",
    ),
    "type": (lambda f: _with(f, **{EMBEDDING: torch.zeros(300, 32).long()}), r"embed_tokens.weight has the type I64"),
    "NaN": (lambda f: _with(f, **{EMBEDDING: torch.full((300, 32), torch.nan)}), "model.embed_tokens.weight holds"),
    "model_type": (
        lambda f: _config(f, model_type="lama"),
        r"config.json:\d+: model_type 'lama' is not supported; did you",
    ),
    "field": (lambda f: _config(f, widht=3, depht=4), r"(?s)config.json:\d+: widht is not understood.*depht is not"),
    "quantised": (lambda f: _config(f, quantization_config={"bits": 4}), "config.json: quantization_config says"),
    "heads": (lambda f: _config(f, num_key_value_heads=3), r"config.json: model.n_kv_heads: n_heads 4 / n_kv_heads 3"),
    "layers": (lambda f: _config(f, num_hidden_layers=2000), r"config.json: model.n_layers: must be at most 1,024"),
    "no config": (lambda f: (f / "config.json").unlink(), "there is no config.json"),
    "cut": (_cut, "model.safetensors cannot be read"),
    "pickle": (_pickled, "pytorch_model.bin is pickle"),
    "pipe": (_pipe, "there are no safetensors files"),
    "index": (lambda f: _index(f, [1]), "index.json is no index"),
    "index without files": (lambda f: _index(f, {"weight_map": {"a": "b.safetensors"}}), "not there: b.safetensors"),
    "index beside": (_beside, r"index.json does not name model.safetensors, which stands beside it"),
    "index with more": (
        lambda f: _index(f, {"weight_map": {"a.b": "model.safetensors"}}),
        "index.json names tensors that its files do not have: a.b",
    ),
    "gguf": (lambda f: (f / "model.safetensors").rename(f / "m.gguf"), "m.gguf is imported by its own name"),
    "index outside": (lambda f: _index(f, {"weight_map": {"a": "../b.safetensors"}}), "not there: ../b.safetensors"),
    "tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json: the tokenizers library cannot"),
    "ends": (
        lambda f: (f / "generation_config.json").write_text('{"eos_token_id": [2, "</s>"]}'),
        r"generation_config.json cannot be read: eos_token_id is \[2, '</s>'\], expected the number of a token",
    ),
    "small list": (
        lambda f: (f / "special_tokens_map.json").write_text("[]"),
        "special_tokens_map.json cannot be read",
    ),
    "small file": (lambda f: (f / "tokenizer_config.json").write_text("{"), "tokenizer_config.json cannot be read"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_named_and_nothing_is_left(folder: Path, out: Path, name: str):
    write_folder(folder)
    spoil, message = BAD[name]
    spoil(folder)
    with pytest.raises((CheckpointError, DataError), match=message) as error:
        import_folder([folder], out)
    assert error.value.exit_code == 4
    assert not list(out.parent.iterdir())


def test_a_missing_file_of_several_is_named_where_its_tensors_are_needed(folder: Path, out: Path):
    write_folder(folder, files=3)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="say that there are more: model-00002-of-00003.safetensors"):
        import_folder([folder], out)


def test_a_tokenizer_with_more_tokens_than_rows_is_refused(folder: Path, out: Path):
    write_folder(folder, replace(LLAMA, vocab_size=270), tokens=280)
    with pytest.raises(CheckpointError, match=r"tokenizer.json: the tokenizer has \d+ tokens, .* 270 rows"):
        import_folder([folder], out)


def test_nothing_is_overwritten(folder: Path, out: Path):
    write_folder(folder)
    out.mkdir()
    with pytest.raises(JobError, match="exists, and nothing is overwritten"):
        import_folder([folder], out)


def test_an_interruption_leaves_nothing(folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch):
    write_folder(folder)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(import_run, "write_atomic", interrupted)
    with pytest.raises(KeyboardInterrupt):
        import_folder([folder], out)
    assert not list(out.parent.iterdir())


def test_a_missing_folder_of_runs_is_made_and_left_only_if_the_run_is(folder: Path, runs: Path):
    write_folder(folder)
    whole = load_file(folder / "model.safetensors")
    _with(folder, **{EMBEDDING: torch.full((300, 32), torch.nan)})  # found while the run is being written
    with pytest.raises(CheckpointError):
        import_folder([folder], runs / "new" / "run")
    assert not (runs / "new").exists()
    write_tensors(folder, whole)
    import_folder([folder], runs / "new" / "run")
    with pytest.raises(JobError, match="new/run/config.yaml is no folder"):
        import_folder([folder], runs / "new" / "run" / "config.yaml" / "run")


def test_an_imported_run_does_not_resume(folder: Path, out: Path):
    from phalanx.checkpoint.manifest import require_resumable

    write_folder(folder)
    import_folder([folder], out)
    with pytest.raises(PhalanxError, match=f"model.from={out} and another run.name"):
        require_resumable(RunDirectory(out).checkpoint())


def test_the_command(folder: Path, out: Path, capsys: pytest.CaptureFixture[str]):
    write_folder(folder)
    assert main(["import", "hf", str(folder), "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["model_type"], found["vocab_size"]) == (str(out), "llama", VOCABULARY)
    assert main(["import", "hf", str(folder), "--out", str(out)]) == 2
    assert main(["import", "hf", str(folder)]) == 2
    assert main(["import", str(folder), "--out", str(out)]) == 2
    assert "name the format first" in capsys.readouterr().err


def test_a_field_of_config_json_may_be_left_out(folder: Path, out: Path, capsys: pytest.CaptureFixture[str]):
    write_folder(folder)
    _config(folder, colour="blue", rope_parameters={"rope_theta": 1e4, "rope_type": "default", "shade": 3})
    words = ["import", "hf", str(folder), "--out", str(out)]
    assert main(words) == 4
    assert "model.ignore_config=[colour]" in capsys.readouterr().err
    assert main([*words, "--ignore-config", "colour,rope_parameters.shade"]) == 0
    assert "colour is read as if it were absent" in capsys.readouterr().err


GROWTH = """
import sys
from pathlib import Path
from phalanx.exchange.import_run import import_folder

def peak():
    return 1024 * int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1])

Path("/proc/self/clear_refs").write_text("5")
before = peak()
done = import_folder([Path(sys.argv[1])], Path(sys.argv[2]))
print(done.bytes, peak() - before)
"""


def test_a_model_is_not_loaded_whole(folder: Path, out: Path):
    """Memory grows by less than half of the weights, of which the largest parameter is a hundredth."""
    write_folder(folder, replace(LLAMA, n_layers=12, d_model=256, d_ff=768), files=2)
    child = subprocess.run(
        [sys.executable, "-c", GROWTH, str(folder), str(out)], check=True, capture_output=True, text=True
    )
    size, growth = map(int, child.stdout.split())
    assert size > 50e6
    assert growth < size / 2


# Models of the hub: downloaded on request only, and one message where they cannot be.


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_a_model_of_the_hub_is_imported_from_what_was_downloaded(tmp_path, monkeypatch, capsys):
    write_folder(tmp_path / "theirs")
    asked = []

    def download(repository: str, **options: object) -> str:
        asked.append((repository, options))
        return str(tmp_path / "theirs")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert main(["import", "hf", "hub:someone/llama@main", "--out", "ours"]) == 0
    [(repository, options)] = asked
    assert (repository, options["revision"]) == ("someone/llama", "main")
    assert not any(pattern.endswith((".bin", ".py")) for pattern in options["allow_patterns"])
    assert "phalanx generate ours" in capsys.readouterr().out
    assert main(["import", "hf", "hub:someone/llama", "--out", "ours"]) == 2
    assert len(asked) == 1  # nothing is downloaded for a target that exists


def test_without_a_network_the_message_says_what_to_do():
    with pytest.raises(RunError, match=r"(?s)hub:openai-community/gpt2 is neither in the cache.*hf download"):
        hub.downloaded("hub:openai-community/gpt2")


@pytest.mark.parametrize("text", ["hub:", "hub:../x", "hub:a/b/c", "hub:https://x/y"])
def test_what_is_no_name_of_a_model_is_refused(text):
    with pytest.raises(JobError, match="no name of a model"):
        hub.downloaded(text)


# What is not there is said with what would be taken, before any weights are read.


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("owner/model", 2, "owner/model: no such file; a model on the Hugging Face hub is hub:owner/model"),
        ("nosuch", 2, "nosuch: no such file; give one folder, or files"),
        ("empty.gguf", 4, "empty.gguf cannot be read: the file is empty"),
        ("ours", 4, "which describes the model; it is a run already"),
    ],
)
def test_an_import_of_nothing(tmp_path, monkeypatch, capsys, name, code, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "config.yaml").touch()
    assert main(["import", "hf", name, "--out", "run"]) == code
    assert said in capsys.readouterr().err
