"""Runs that start from the weights of others, in any layout: parameters only, from step 0, once."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from exchange.folders import LLAMA, write_folder, write_tensors
from phalanx.check.load import load_words
from phalanx.checkpoint.consolidated import open_source
from phalanx.config import overrides
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.data.tokenizer import ByteTokenizer, Tokenizer
from phalanx.errors import CheckpointError, DataError, JobError
from phalanx.exchange.export import export
from phalanx.exchange.import_run import import_folder
from phalanx.train.run_directory import RunDirectory
from phalanx.train.start import keep_small_files, notices, open_start, vocabulary_of
from train.runs import change, losses, train, weights

LAYOUTS = [Layout(dp_shard=2, tp=2, zero=3, sp=True), Layout(dp_shard=2, pp=2, zero=1)]


def starting(job, source: Path):
    """The job with the shape of the weights that it starts from."""
    return dataclasses.replace(job, model=dataclasses.replace(LLAMA, from_=str(source)))


def exported(job) -> dict[str, torch.Tensor]:
    """Returns the tensors of a run as they are written for transformers."""
    run = RunDirectory.of(job).path
    with open_source(run) as source:
        export(source, run.with_name(f"{run.name}-hf"))
    return load_file(run.with_name(f"{run.name}-hf") / "model.safetensors")


def test_a_run_starts_from_weights_in_any_layout(ranks, job, tmp_path):
    write_folder(tmp_path / "theirs")
    import_folder([tmp_path / "theirs"], tmp_path / "ours")
    job = change(change(job, "train", steps=2, eval_samples=0), "checkpoint", every=1)
    alone = starting(job, tmp_path / "theirs")
    ranks(train, 1, alone)
    expected = exported(alone)
    for number, layout in enumerate(LAYOUTS):
        spread = change(starting(job, tmp_path / "ours"), "run", name=f"spread{number}")
        ranks(train, layout.processes, dataclasses.replace(spread, layout=layout))
        assert losses(spread) == pytest.approx(losses(alone), rel=1e-9)
        found = exported(spread)
        assert found.keys() == expected.keys()
        assert all(torch.allclose(found[name], tensor, rtol=0, atol=1e-9) for name, tensor in expected.items())
    first = weights(alone)
    assert first["embed.weight"].shape == (LLAMA.vocab_size, LLAMA.d_model)  # 13 tokens, and rows for padding
    shutil.rmtree(tmp_path / "theirs")
    ranks(train, 1, change(alone, "train", steps=3))  # resumes without the weights
    assert len(losses(alone)) == 3


def test_master_weights_are_not_rounded(ranks, job, tmp_path):
    """A run in bf16 keeps the fp32 weights that it starts from, in the optimizer's copies."""
    model = write_folder(tmp_path / "theirs")
    still = change(change(job, "train", steps=1, eval_samples=0, precision="bf16"), "optimizer", lr=0.0)
    ranks(train, 1, starting(still, tmp_path / "theirs"))
    found = weights(still)["master/head.weight"]
    assert (found - model.get_parameter("head.weight").float()).abs().max() < 1e-7


def test_a_shape_that_differs_is_refused_with_both_values(ranks, job, tmp_path):
    write_folder(tmp_path / "theirs")
    wide = starting(job, tmp_path / "theirs")
    wide = dataclasses.replace(wide, model=dataclasses.replace(wide.model, d_ff=64))
    with pytest.raises(CheckpointError, match=r"mlp.down.weight is \(32, 48\) there and \(32, 64\) here"):
        ranks(train, 1, wide)


def test_the_job_takes_shape_and_tokenizer(tmp_path):
    write_folder(tmp_path / "theirs")
    import_folder([tmp_path / "theirs"], tmp_path / "ours")
    for source in (tmp_path / "theirs", tmp_path / "ours", tmp_path / "ours" / "checkpoints" / "step-000000"):
        loaded = load_words(overrides.parse([f"model.from={source}", "data.corpus=text", "data.path=x", "seq_len=16"]))
        job = loaded.job
        assert dataclasses.replace(job.model, from_="", seq_len=32) == LLAMA
        assert Path(job.data.tokenizer).name == "tokenizer.json"
        assert loaded.origins["model.d_model"] == f"model.from {source}"
        assert open_start(job.model).manifest.tensors.keys() > {"embed.weight"}


def test_a_field_of_config_json_is_left_out_on_purpose(tmp_path):
    write_folder(tmp_path / "theirs")
    config = tmp_path / "theirs" / "config.json"
    config.write_text(config.read_text().replace("{", '{"colour": "blue", ', 1))
    words = [f"model.from={tmp_path / 'theirs'}", "tokenizer=byte"]
    with pytest.raises(JobError, match=r"config.json:1: colour is not understood .*model.ignore_config=\[colour\]"):
        load_words(overrides.parse(words))
    job = load_words(overrides.parse([*words, "model.ignore_config=[colour]"])).job
    assert job.model.ignore_config == ("colour",)
    assert open_start(job.model).manifest.tensors.keys() > {"embed.weight"}
    assert not list(notices(job, Tokenizer.load(tmp_path / "theirs")))
    shape = load_words(overrides.parse([f"model=hf:{config}", "model.ignore_config=[colour]"])).job.model
    assert shape.n_layers == job.model.n_layers
    import_folder([tmp_path / "theirs"], tmp_path / "ours", ignore_config=("colour",))
    for wrong, message in {
        f"model.from={tmp_path / 'ours'}": "is a run: leave it out",
        "model=gpt2": "it is for a config.json",
    }.items():
        with pytest.raises(JobError, match=message):
            load_words(overrides.parse([wrong, "model.ignore_config=[colour]"]))


def test_a_tied_model_with_a_head_of_its_own_is_imported_first(tmp_path):
    tied = dataclasses.replace(LLAMA, tied=True)
    write_folder(tmp_path / "theirs", tied)
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    write_tensors(
        tmp_path / "theirs", theirs | {"lm_head.weight": torch.ones_like(theirs["model.embed_tokens.weight"])}
    )
    with pytest.raises(CheckpointError, match="lm_head.weight differs from the embedding .* then model.from=RUN"):
        open_start(dataclasses.replace(tied, from_=str(tmp_path / "theirs")))


def test_what_fits_but_differs_is_told(tmp_path):
    write_folder(tmp_path / "theirs")
    words = [f"model.from={tmp_path / 'theirs'}", "model.rope_theta=500000", "tokenizer=byte"]
    job = load_words(overrides.parse(words)).job
    found = list(notices(job, ByteTokenizer()))
    assert "rope_theta is 10000.0" in found[0]
    assert "the tokenizer differs" in found[1]


def test_small_files_go_along_with_the_weights_unless_the_tokenizer_is_another(job, tmp_path):
    """An export of the run has the generation settings and the context of the imported model."""
    write_folder(tmp_path / "theirs")
    (tmp_path / "theirs" / "generation_config.json").write_text('{"temperature": 0.6}')
    import_folder([tmp_path / "theirs"], tmp_path / "ours")
    own = Tokenizer.load(tmp_path / "ours")
    for source in (tmp_path / "theirs", tmp_path / "ours"):
        for tokenizer, names in ((ByteTokenizer(), []), (own, ["config.json", "generation_config.json"])):
            run = tmp_path / f"{source.name}-{len(names)}"
            run.mkdir()
            for _ in range(2):  # a run that resumes has them
                keep_small_files(starting(job, source), tokenizer, run)
            assert sorted(file.name for file in run.glob("hugging_face/*")) == names
    keep_small_files(starting(job, tmp_path / "gone"), own, tmp_path)
    assert not (tmp_path / "hugging_face").exists()


def test_a_tokenizer_with_more_tokens_than_rows_is_refused(job, tmp_path):

    write_folder(tmp_path / "theirs")
    with pytest.raises(DataError, match=r"the tokenizer has 999 tokens, the embedding in .* has 300 rows"):
        vocabulary_of(starting(job, tmp_path / "theirs"), RunDirectory(tmp_path / "run"), 999)


def test_weights_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(JobError, match="there is no such folder; give a run's directory"):
        load_words(overrides.parse([f"model.from={tmp_path / 'nowhere'}"]))
    (tmp_path / "m.gguf").touch()
    with pytest.raises(JobError, match=r"m.gguf is a GGUF file, which is imported first: .* --out runs/m"):
        load_words(overrides.parse([f"model.from={tmp_path / 'm.gguf'}"]))


def test_a_larger_vocabulary_is_padding_and_a_smaller_one_is_refused(tmp_path: Path) -> None:
    job, directory = Job(), RunDirectory(tmp_path / "run")

    def rows(**model: object) -> int:
        return vocabulary_of(dataclasses.replace(job, model=dataclasses.replace(job.model, **model)), directory, 256)

    assert rows() == 256
    assert rows(vocab_size=512) == 512
    assert rows(vocab_size=50257, preset="gpt2") == 256  # the preset's own tokenizer is another
    assert rows(vocab_size=50304, preset="gpt2") == 50304
    with pytest.raises(JobError, match="model.vocab_size is 200, and the tokenizer has 256 tokens"):
        rows(vocab_size=200)
