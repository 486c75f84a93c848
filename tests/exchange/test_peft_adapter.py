"""Adapters of PEFT are merged into their base: W + alpha / r B A, to 1e-9 in float64, or refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from exchange.folders import LLAMA, write_folder, write_tensors
from families.counterparts import COUNTERPARTS, small_model
from phalanx.check.load import load_words
from phalanx.checkpoint.shard_file import Reader
from phalanx.cli.main import main
from phalanx.config import overrides
from phalanx.config.model import ModelConfig
from phalanx.config.presets import PRESETS
from phalanx.data.tokenizer import train_bpe
from phalanx.errors import CheckpointError, JobError
from phalanx.exchange.import_run import import_folder
from phalanx.train.run_directory import RunDirectory
from phalanx.train.start import open_start

GPT2 = small_model(PRESETS["gpt2"], COUNTERPARTS["gpt2"].small)
PLAIN = {"peft_type": "LORA", "r": 3, "lora_alpha": 5, "bias": "none", "init_lora_weights": True, "rank_pattern": {}}
Q = "model.layers.{}.self_attn.q_proj"


def write_adapter(
    folder: Path,
    base: str,
    modules: list[str],
    more: dict[str, Tensor] | None = None,
    ranks: dict[str, int] | None = None,
    **settings: Any,
):
    """Writes an adapter of random matrices beside the modules of a base in `folder`/base. Returns its tensors."""
    sizes = {name: tensor.shape for name, tensor in load_file(folder / "base" / "model.safetensors").items()}
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, Tensor] = {}
    transposed = settings.get("fan_in_fan_out", False)
    for module in modules:
        rows, columns = sizes[f"{module}.weight"][::-1] if transposed else sizes[f"{module}.weight"]
        rank = (ranks or {}).get(module, 3)
        for part, shape in {"A": (rank, columns), "B": (rows, rank)}.items():
            matrix = torch.randn(shape, generator=generator, dtype=torch.float64)
            tensors[f"base_model.model.{module}.lora_{part}.weight"] = matrix
    (folder / "adapter").mkdir()
    save_file(tensors | (more or {}), folder / "adapter" / "adapter_model.safetensors")
    named = {"base_model_name_or_path": base, "target_modules": sorted({each.split(".")[-1] for each in modules})}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(PLAIN | named | settings))
    return tensors


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a base in it."""
    write_folder(tmp_path / "base")
    (tmp_path / "runs").mkdir()
    return tmp_path


def merge(home: Path, paths: list[Path] | None = None, **options: Any) -> dict[str, Tensor]:
    """Imports the adapter. Returns the run's parameters."""
    run = home / "runs" / f"run{len(list((home / 'runs').iterdir()))}"
    import_folder(paths or [home / "adapter"], run, **options)
    with Reader(RunDirectory(run).checkpoint()) as reader:
        return {name: reader.read(name).clone() for name in reader.names()}


def merged_by_hand(home: Path, tensors: dict[str, Tensor], scale: float, transposed: bool = False) -> dict[str, Tensor]:
    """Returns the parameters of a base whose file has W + scale B A in place of W."""
    theirs = load_file(home / "base" / "model.safetensors")
    for name, a in tensors.items():
        if name.endswith("lora_A.weight"):
            product = tensors[name.replace("lora_A", "lora_B")] @ a
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            theirs[f"{module}.weight"] += scale * (product.T if transposed else product)
    write_tensors(home / "base", {name: tensor.contiguous() for name, tensor in theirs.items()})
    return merge(home, [home / "base"])


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.allclose(found[name], tensor, rtol=0, atol=1e-9) for name, tensor in expected.items()
    )


@pytest.mark.parametrize("rs", [False, True])
def test_an_adapter_is_merged_into_its_base(home: Path, rs: bool) -> None:
    modules = [Q.format(0), Q.format(1), "model.layers.1.mlp.down_proj", "lm_head"]
    before = merge(home, [home / "base"])
    tensors = write_adapter(home, str(home / "base"), modules, use_rslora=rs)
    found = merge(home)
    changed = {name for name, tensor in found.items() if not torch.equal(tensor, before[name])}
    assert changed == {f"blocks.{n}.attn.wq.weight" for n in (0, 1)} | {"blocks.1.mlp.down.weight", "head.weight"}
    assert equal(found, merged_by_hand(home, tensors, 5 / sqrt(3) if rs else 5 / 3))


def test_modules_have_ranks_and_alphas_of_their_own(home: Path) -> None:
    """The first expression that matches counts, at a dot only: proj is the end of no name here."""
    patterns = {
        "rank_pattern": {"proj": 9, "layers.0.self_attn.q_proj": 2, "q_proj": 4},
        "alpha_pattern": {r"layers\.\d.mlp\..*": 7, "down_proj": 8, "k_proj": 0.5},
    }
    modules: dict[str, tuple[int, float]] = {
        Q.format(0): (2, 5),
        Q.format(1): (4, 5),
        "model.layers.1.mlp.down_proj": (3, 7),
    }
    modules["model.layers.0.self_attn.k_proj"] = (3, 0.5)
    ranks = {name: rank for name, (rank, _) in modules.items()}
    tensors = write_adapter(home, str(home / "base"), [*modules], ranks=ranks, **patterns)
    found = merge(home)
    scaled = {
        name: tensor * (modules[module][1] / modules[module][0] if name.endswith("B.weight") else 1)
        for name, tensor in tensors.items()
        for module in [name.removeprefix("base_model.model.").rpartition(".lora_")[0]]
    }
    assert equal(found, merged_by_hand(home, scaled, 1))


def test_gpt2_s_matrices_are_transposed(tmp_path: Path) -> None:
    write_folder(tmp_path / "base", GPT2, tokens=0)
    (tmp_path / "runs").mkdir()
    modules = [f"transformer.h.0.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc")]
    tensors = write_adapter(tmp_path, str(tmp_path / "base"), modules, fan_in_fan_out=True)
    assert equal(merge(tmp_path), merged_by_hand(tmp_path, tensors, 5 / 3, transposed=True))


def test_tensors_of_modules_to_save_replace_those_of_the_base(home: Path) -> None:
    norm = torch.randn(LLAMA.d_model, dtype=torch.float64)
    saved = {"base_model.model.model.norm.weight": norm}
    write_adapter(home, str(home / "base"), [Q.format(0)], saved, modules_to_save=["norm"])
    assert torch.equal(merge(home)["final_norm.weight"], norm)


def test_a_merged_matrix_is_rounded_once(home: Path) -> None:
    theirs = load_file(home / "base" / "model.safetensors")
    write_tensors(home / "base", {name: tensor.bfloat16() for name, tensor in theirs.items()})
    tensors = write_adapter(home, str(home / "base"), [Q.format(0)])
    found = merge(home)["blocks.0.attn.wq.weight"]
    base = theirs[f"{Q.format(0)}.weight"].bfloat16().double()
    a, b = (tensors[f"base_model.model.{Q.format(0)}.lora_{part}.weight"] for part in "AB")
    assert torch.equal(found, (base + 5 / 3 * (b @ a)).bfloat16())
    wide = merge(home, precision="fp64")["blocks.0.attn.wq.weight"]
    torch.testing.assert_close(wide, base + 5 / 3 * (b @ a), rtol=0, atol=1e-9)


def test_the_base_is_that_of_the_settings_or_is_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_adapter(home, "../base", [Q.format(0)])
    expected = merge(home)  # beside the adapter
    config = home / "adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace("../base", "someone/llama"))
    words = ["import", "hf", str(home / "adapter"), "--out", str(home / "runs" / "named")]
    assert main(words) == 4
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "is 'someone/llama', which is no folder here: --base hub:someone/llama downloads it, --base DIR names it"
        in said
    )
    assert main([*words, "--base", str(home / "base")]) == 0
    assert "merged the LoRA adapter" in capsys.readouterr().err
    assert equal(merge(home, base=home / "base"), expected)
    (home / "adapter" / "model.safetensors").write_bytes((home / "base" / "model.safetensors").read_bytes())
    (home / "adapter" / "config.json").write_bytes((home / "base" / "config.json").read_bytes())
    assert equal(merge(home), expected)  # beside its weights, in one folder
    reader = open_start(replace(LLAMA, from_=str(home / "adapter")))
    torch.testing.assert_close(reader.read("blocks.0.attn.wq.weight"), expected["blocks.0.attn.wq.weight"])
    with pytest.raises(JobError, match="--base .* is for an adapter of PEFT"):
        merge(home, [home / "base"], base=home / "base")
    with pytest.raises(CheckpointError, match="has an adapter itself"):
        merge(home, base=home / "adapter")


def test_an_adapter_s_own_tokenizer_is_taken(home: Path) -> None:
    write_adapter(home, "../base", [Q.format(0)])
    own = train_bpe(["another text " * 9], 270)
    own.save(home / "adapter")
    (home / "adapter" / "chat_template.jinja").write_text("{{ messages }}")
    merge(home)
    run = home / "runs" / "run0"
    assert (run / "tokenizer.json").read_text() == own.definition()
    assert (run / "chat_template.jinja").read_text() == "{{ messages }}"


def test_a_job_that_starts_from_an_adapter_is_told_to_import_it(home: Path) -> None:
    write_adapter(home, "../base", [Q.format(0)])
    with pytest.raises(JobError, match="adapter is an adapter of PEFT, .*then model.from=RUN"):
        load_words(overrides.parse([f"model.from={home / 'adapter'}"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', supported: 'LORA'"),
        ({"bias": "all"}, "bias is 'all', supported: 'none'"),
        ({"use_dora": True}, "use_dora is true, which is not plain LoRA"),
        ({"rank_pattern": {"o_proj": 4}}, "has rank 3, r and rank_pattern say 4"),
        ({"rank_pattern": {"o_proj": 0}}, "rank_pattern.o_proj is 0"),
        ({"rank_pattern": ["o_proj"]}, "rank_pattern is .*, expected an object"),
        ({"alpha_pattern": {"o_proj": "4"}}, "alpha_pattern.o_proj is '4', expected a number"),
        ({"alpha_pattern": {"(o_proj": 4}}, r"alpha_pattern.\(o_proj is no regular expression"),
        ({"layer_replication": [[0, 1]]}, "layer_replication is "),
        ({"lora_bias": True}, "lora_bias is true"),
        ({"of_the_future": 1}, "of_the_future is 1, which is not plain LoRA"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which changes the base's weights"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is true, which is for gpt2 only"),
        ({"r": 0}, "r is 0, expected at least 1"),
        ({"r": "8"}, "r is '8', expected a whole number"),
    ],
)
def test_what_is_not_plain_lora_is_refused_by_name(home: Path, settings: dict[str, object], message: str) -> None:
    write_adapter(home, "../base", ["model.layers.0.self_attn.o_proj"])
    config = home / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    with pytest.raises(CheckpointError, match=message):
        merge(home)
    assert not list((home / "runs").iterdir())


def _pickled(home: Path) -> None:
    (home / "adapter" / "adapter_model.safetensors").rename(home / "adapter" / "adapter_model.bin")


def _tensors(home: Path, change: dict[str, Tensor | None]) -> None:
    file = home / "adapter" / "adapter_model.safetensors"
    left = {name: tensor for name, tensor in (load_file(file) | change).items() if tensor is not None}
    save_file(left, file)


A, B = (f"base_model.model.{Q.format(0)}.lora_{part}.weight" for part in "AB")
WRONG = {
    "pickle": (_pickled, "no adapter_model.safetensors; adapter_model.bin is pickle"),
    "half": (lambda home: _tensors(home, {B: None}), "lora_A.weight has no lora_B.weight"),
    "nothing": (lambda home: _tensors(home, {A: None, B: None, "x": None}), "holds no adapter of a matrix"),
    "shape": (
        lambda home: _tensors(home, {A: torch.zeros(3, 7)}),
        r"do not fit .*q_proj.weight \(32, 32\)",
    ),
    "unknown": (
        lambda home: _tensors(home, {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(3, 300)}),
        "tensor base_model.model.model.embed_tokens.lora_embedding_A belongs to no tensor of",
    ),
    "magnitude": (
        lambda home: _tensors(home, {f"base_model.model.{Q.format(0)}.lora_magnitude_vector": torch.zeros(32)}),
        "lora_magnitude_vector belongs to no tensor of",
    ),
    "resized": (
        lambda home: _tensors(home, {"base_model.model.model.embed_tokens.weight": torch.zeros(301, 32)}),
        r"embed_tokens.weight \(301, 32\) does not fit model.embed_tokens.weight \(300, 32\)",
    ),
    "settings": (lambda home: (home / "adapter" / "adapter_config.json").write_text("["), "adapter_config.json cannot"),
}


@pytest.mark.parametrize("name", WRONG)
def test_tensors_that_do_not_fit_are_named(home: Path, name: str) -> None:
    write_adapter(home, "../base", [Q.format(0)])
    spoil, message = WRONG[name]
    spoil(home)
    with pytest.raises(CheckpointError, match=message):
        merge(home)
    assert not list((home / "runs").iterdir())


def test_modules_without_the_matrices_that_the_settings_name_are_told(home: Path) -> None:
    write_adapter(home, str(home / "base"), [Q.format(0)], target_modules=["q_proj", "v_proj", "router"])
    [note] = [each for each in import_folder([home / "adapter"], home / "run").notes if "merged" in each]
    assert note.endswith("; there are no matrices of v_proj, which target_modules names")


def test_a_module_to_save_that_was_not_saved_is_named(home: Path) -> None:
    write_adapter(home, str(home / "base"), [Q.format(0)], modules_to_save=["classifier", "lm_head"])
    with pytest.raises(CheckpointError, match="no tensor of lm_head, which modules_to_save of adapter_config.json"):
        merge(home)


def test_a_tied_head_is_not_changed(tmp_path: Path) -> None:
    tied: ModelConfig = replace(LLAMA, tied=True)
    write_folder(tmp_path / "base", tied)
    (tmp_path / "runs").mkdir()
    saved = {"base_model.model.lm_head.weight": torch.zeros(300, 32)}
    write_adapter(tmp_path, "../base", [Q.format(0)], saved, modules_to_save=["lm_head"])
    with pytest.raises(CheckpointError, match="changes lm_head.weight, and the base's head is its embedding"):
        merge(tmp_path)
