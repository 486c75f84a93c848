"""Every loader of a file that somebody else may have written, with a valid sample. `load` also uses what it read, as
the program would."""

from __future__ import annotations

import io
import json
import struct
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import yaml
from torch.distributed.checkpoint.state_dict_saver import save

from generate.written import write_run
from model.kinds import KINDS
from phalanx.check.load import as_yaml, load_file, load_words
from phalanx.checkpoint.consolidated import open_source
from phalanx.checkpoint.convert import convert
from phalanx.checkpoint.inventory import check
from phalanx.checkpoint.manifest import MANIFEST, job_of, manifest_digest
from phalanx.checkpoint.remote import CommitRecord, RemoteCheckpoints, folder_of
from phalanx.checkpoint.shard_file import Reader
from phalanx.config import clusters, overrides
from phalanx.config.hugging_face import config_json
from phalanx.config.job import Data
from phalanx.config.presets import PRESETS
from phalanx.cost.prediction import Prediction
from phalanx.cost.spec import StepSpec
from phalanx.data.corpus import scan, segments
from phalanx.data.index import CorpusRecord, Index, map_shard, open_shards, write_index, write_shard
from phalanx.data.token_table import definition_of
from phalanx.data.tokenizer import ByteTokenizer, CharTokenizer, NumberTokenizer, Tokenizer, train_bpe
from phalanx.errors import JobError
from phalanx.exchange.gguf import GgufModel
from phalanx.foreign import read as foreign
from phalanx.generate.load import vocabulary_of
from phalanx.launch.verdict import End, Outcome, verdict
from phalanx.pictures import experts
from phalanx.schedule import catalogue
from phalanx.schedule import file as schedule_file
from phalanx.train.run_directory import newest_step
from phalanx.validation import table

JOB = b"""\
model: {"n_layers": 4, "d_model": 128, "n_heads": 4, "d_ff": 384, "seq_len": 128, "norm": "rmsnorm", "vocab_size": 99}
cluster:
  preset: dgx-h100:1
layout:
  dp_shard: 2
  tp: 2
  pp: 2
  schedule: 1f1b
  recompute: selective
data:
  corpus: text
  path: corpus.txt
optimizer:
  lr: 4.0e-3
  betas: [0.9, 0.95]
train: {steps: 500, global_batch: 32, precision: bf16}
run:
  name: "main"
"""
JSON_JOB = json.dumps(yaml.safe_load(JOB)).encode()
WORDS = b"""\
model=llama3-8b
cluster=dgx-h100:2
dp_shard=8,tp=2,sp=true
--lr
1e-3
train.global_batch=16
--train.precision=bf16
--no-compile
data=text
data.path=x
"""
CLUSTER = b"""\
# compute: measured
cluster:
  devices_per_node: 2
  device: cpu
  accelerator: {name: a cpu, fp32_tflops: 0.2, ceiling: 1.0, bandwidth_gbs: 40.0, memory_gib: 8.0}
  intra: {gbs: 2.5, latency_us: 80.0}
  calibration:
    compute:
      provenance: {date: "2026-01-01", host: h, cores: 2}
      products: {error: 0.1, spread: 0.1, rounds: 3}
"""
TABLE = b"""\
row_id,source,model_name,gpu,n_gpus,tp,pp,dp,cp,ep,zero_stage,schedule,recompute,global_batch_seqs,micro_batch,seq_len,\
peak_mem_gb,step_time_s,precision,notes
a-1,torchtitan,llama3-8b,H100,8,2,1,4,1,1,3,1f1b,full,16,1,8192,60,1.5,bf16,"max allocated, close to oom"
a-2,narayanan 2021,gpt 175b,A100,1536,8,12,16,1,1,1,interleaved,selective,1536,1,2048,,,fp16,local batch 2
"""
MEGATRON = b"""\
TP=${TP:-4}
ARGS=(--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --micro-batch-size 1)
ARGS+=(--global-batch-size 64 --bf16 --vocab-size 1000 --tensor-model-parallel-size $TP)
if [ "$TP" = 4 ]; then ARGS+=(--sequence-parallel --num-experts 8 --moe-layer-freq "[0]*2+[1]*6"); fi
torchrun --nproc_per_node $((4 * 2)) --nnodes 2 pretrain_gpt.py ${ARGS[@]} --use-distributed-optimizer
"""
PRIMUS = b"""\
modules:
  pre_trainer:
    framework: megatron
    model: llama3.1_8B.yaml
    overrides: {global_batch_size: 64, micro_batch_size: 1, tensor_model_parallel_size: "${TP:2}", seq_length: 512}
"""
TITAN = b"""\
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 8 # sequences
seq_len = 2048
[parallelism]
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
"""
AXOLOTL = b"""\
base_model: NousResearch/Llama-3.2-1B
sequence_len: 2048
micro_batch_size: 2
optimizer: adamw_bnb_8bit
warmup_ratio: 0.1
bf16: auto
adapter: lora
lora_r: 16
lora_target_modules: [q_proj, v_proj]
fsdp_config: {fsdp_version: 2, reshard_after_forward: true}
"""
BRIDGE = b"""\
from megatron.bridge.training.config import ConfigContainer
def llama3_8b_pretrain_config():
    cfg = ConfigContainer(mixed_precision="bf16_mixed")
    cfg.train.global_batch_size = 32 * 2
    cfg.train.micro_batch_size = 1
    cfg.model.tensor_model_parallel_size = 2 if cfg.train.micro_batch_size == 1 else 4
    return cfg
"""
JSONL = b'{"text": "one\\n", "meta": {"id": 1}}\n{"text": "two \\u20ac", "n": [1, 2.5]}\n\n{"text": ""}\n'


@dataclass(frozen=True)
class Loader:
    """A loader, the file that it reads, and the valid content of that file."""

    file: Path
    sample: bytes
    load: Callable[[], object]
    seal: Callable[[bytes], bytes] = lambda content: content
    """Makes a mutation agree with its own digest, so that what lies behind that check is reached, too."""


def job(folder: Path) -> Loader:
    path = folder / "job.yaml"
    return Loader(path, JOB, lambda: as_yaml(load_file(path)))


def json_job(folder: Path) -> Loader:
    """A job written as JSON, which is YAML too, so that mutations of its values are whole files."""
    path = folder / "job.yaml"
    return Loader(path, JSON_JOB, lambda: load_file(path))


def words(folder: Path) -> Loader:
    """The words of a command line, one per line of a file."""
    path = folder / "words"

    def load() -> object:
        argv = path.read_bytes().decode(errors="surrogateescape").replace("\0", "").splitlines()
        return load_words(overrides.parse(argv, ("json", "fresh")))

    return Loader(path, WORDS, load)


def hugging_face(folder: Path) -> Loader:
    """A config.json, whose model is counted."""
    path = folder / "config.json"
    values = config_json.write(PRESETS["gemma2-2b"])[1]
    return Loader(path, json.dumps(values).encode(), lambda: load_words(overrides.parse([f"model=hf:{path}"])))


def cluster(folder: Path) -> Loader:
    path = folder / "cluster.yaml"
    return Loader(path, CLUSTER, lambda: clusters.read_local(path=path))


def schedule(folder: Path) -> Loader:
    path = folder / "mine.csv"
    sample = schedule_file.text(catalogue.build("interleaved_1f1b", 2, 4)).encode()
    return Loader(path, b"# name: mine\n# steps: 1\n" + sample, lambda: schedule_file.read(path))


def rows(folder: Path) -> Loader:
    path = folder / "table.csv"

    def not_predicted(spec: StepSpec) -> Prediction:
        raise JobError("cluster: its prediction is not what is tested here")

    def load() -> object:
        with table._opened(str(path)) as file:
            return table.write(file, io.StringIO(), not_predicted)

    return Loader(path, TABLE, load)


def outcome(folder: Path) -> Loader:
    path = folder / "outcome.json"
    sample = asdict(Outcome(1, 4, "data: damaged", None, 1.5))

    def load() -> object:
        reported = Outcome.read(folder)
        ends = [End(0, 1, 2.0, False, None), End(1, 4, 2.0, False, reported)]
        return verdict(ends, None)

    return Loader(path, json.dumps(sample).encode(), load)


def metrics(folder: Path) -> Loader:
    path = folder / "metrics.jsonl"
    row = {"event": "experts", "time": 1.0, "step": 10, "steps": 10, "loads": {"0": [3, 1], "1": [2, 2]}}
    row |= {"max_violation": 0.5, "worst_layer": 0, "idle": 0}
    lines = [row, {"event": "step", "step": 11, "loss": 1.0}, {**row, "step": 20}]
    return Loader(path, "\n".join(map(json.dumps, lines)).encode(), lambda: experts.svg("run", path))


def progress(folder: Path) -> Loader:
    path = folder / "metrics.jsonl"
    lines = [{"event": "step", "step": step, "time": 1.5, "loss": 1.0} for step in (1, 2)]
    return Loader(path, "\n".join(map(json.dumps, lines)).encode(), lambda: newest_step(path))


def _shards(folder: Path) -> None:
    tokenizer = ByteTokenizer()
    tokenizer.save(folder)
    shards = {
        split: (write_shard(folder, f"{split}-00000.bin", np.arange(size), "uint16"),)
        for split, size in (("train", 200), ("val", 20))
    }
    record = CorpusRecord("text", "a text", 1, 220, 220, "0" * 64, "")
    write_index(folder, Index(("data.corpus=text",), record, tokenizer.fingerprint, 256, "uint16", shards, True))


def index(folder: Path) -> Loader:
    _shards(folder)
    path = folder / "index.json"

    def load() -> object:
        found = open_shards(folder, verify=True)
        return found.fingerprint, [map_shard(folder, found, shard).sum() for shard in found.splits["train"]]

    return Loader(path, path.read_bytes(), load)


def shard(folder: Path) -> Loader:
    _shards(folder)
    path = folder / "train-00000.bin"
    return Loader(path, path.read_bytes(), lambda: open_shards(folder, verify=True))


def jsonl(folder: Path) -> Loader:
    path = folder / "corpus.jsonl"
    return Loader(path, JSONL, lambda: scan(segments([path], Data(corpus="text", path=str(path)))))


def text(folder: Path) -> Loader:
    path = folder / "corpus.txt"
    return Loader(path, "Ein Text,\nüber €\n".encode(), lambda: scan(segments([path], Data(corpus="text"))))


def _tokenizer(folder: Path, tokenizer: Tokenizer, prompt: str) -> Loader:
    tokenizer.save(folder)
    path = folder / "tokenizer.json"

    def load() -> object:
        found = Tokenizer.load(folder)
        ids = found.encode(prompt)
        return found.decode([*ids.tolist(), 0, found.vocab_size - 1]).encode(), found.fingerprint

    return Loader(path, path.read_bytes(), load)


def number(folder: Path) -> Loader:
    return _tokenizer(folder, NumberTokenizer(13), "5 0")


def char(folder: Path) -> Loader:
    return _tokenizer(folder, CharTokenizer("\nab€", unknown=True), "ab")


def library(folder: Path) -> Loader:
    return _tokenizer(folder, train_bpe(["the sea the sea a boat\n" * 9], 264), "the sea")


def manifest(folder: Path) -> Loader:
    write_run(folder / "run", KINDS["llama"])
    [step] = (folder / "run" / "checkpoints").iterdir()
    path = step / MANIFEST

    def sealed(content: bytes) -> bytes:
        try:
            raw = json.loads(content)
            raw["digest"] = manifest_digest({name: raw[name] for name in raw if name != "digest"})
            return json.dumps(raw).encode()
        except (ValueError, TypeError, RecursionError):
            return content

    def load() -> object:
        found = check(step, verify=False)
        return job_of(found), vocabulary_of(found)

    return Loader(path, path.read_bytes(), load, sealed)


def tensors(folder: Path) -> Loader:
    """A safetensors file whose length and digest are what the manifest says: its mutations begin with its header."""
    write_run(folder / "run", KINDS["llama"])
    [step] = (folder / "run" / "checkpoints").iterdir()
    path = step / "rank-00000.safetensors"
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    found = check(step)

    def load() -> object:
        with Reader(found) as reader:
            return [reader.read(name).sum() for name in reader.names()]

    def with_tensors(header: bytes) -> bytes:
        return struct.pack("<Q", len(header)) + header + content[8 + size :]

    return Loader(path, content[8 : 8 + size], load, with_tensors)


def consolidated(folder: Path) -> Loader:
    """A safetensors file with the metadata of a run: its mutations begin with its header."""
    write_run(folder / "run", KINDS["llama"])
    path = folder / "one.safetensors"
    with open_source(folder / "run") as source:
        convert(source, path, "safetensors")
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])

    def load() -> object:
        with open_source(path) as reader:
            return [reader.read(name).sum() for name in reader.names()]

    def with_tensors(header: bytes) -> bytes:
        return struct.pack("<Q", len(header)) + header + content[8 + size :]

    return Loader(path, content[8 : 8 + size], load, with_tensors)


def dcp(folder: Path) -> Loader:
    """The pickle of a DCP checkpoint."""
    state = {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(2), "step": 5}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        save(state, checkpoint_id=folder / "dcp", no_dist=True)
    path = folder / "dcp" / ".metadata"

    def load() -> object:
        with open_source(folder / "dcp", trusted=True) as reader:
            return [reader.read(name).sum() for name in reader.names()]

    return Loader(path, path.read_bytes(), load)


def gguf(folder: Path) -> Loader:
    """A model of llama.cpp, with a byte-level tokenizer."""
    from exchange import gguf_files  # the package that writes the sample is needed only here

    return _gguf(folder / "model.gguf", gguf_files.vocabulary())


def gguf_sentencepiece(folder: Path) -> Loader:
    """A model of llama.cpp, with a tokenizer of SentencePiece's kind."""
    from exchange import gguf_files

    return _gguf(folder / "model.gguf", gguf_files.pieces())


def _gguf(path: Path, vocabulary: dict[str, object]) -> Loader:
    from exchange.test_gguf import llama

    llama(path, vocabulary)

    def load() -> object:
        model = GgufModel(path)
        return [model.read(name).sum() for name in model.shapes], definition_of(model.file.metadata, path)

    content = path.read_bytes()
    header = len(content) - sum(each.nbytes for each in GgufModel(path).file.tensors.values())
    return Loader(path, content[:header], load, lambda head: head + content[header:])


def megatron_script(folder: Path) -> Loader:
    """A script of Megatron-LM, as `--from` reads it."""
    path = folder / "train.sh"
    return Loader(path, MEGATRON, lambda: load_foreign(path))


def primus_yaml(folder: Path) -> Loader:
    path = folder / "exp.yaml"
    return Loader(path, PRIMUS, lambda: load_foreign(path))


def titan_toml(folder: Path) -> Loader:
    path = folder / "job.toml"
    return Loader(path, TITAN, lambda: load_foreign(path))


def axolotl_yaml(folder: Path) -> Loader:
    path = folder / "tune.yaml"
    return Loader(path, AXOLOTL, lambda: load_foreign(path))


def bridge_recipe(folder: Path) -> Loader:
    path = folder / "recipe.py"
    return Loader(path, BRIDGE, lambda: load_foreign(path))


def load_foreign(path: Path) -> object:
    """Reads a file of another framework, and loads the job that it means."""
    line = overrides.parse(["cluster=dgx-h100:2"])
    theirs = foreign.read(path)
    line.base = [each for each in theirs.settings if not each.path.startswith("cluster.")]
    return load_words(line)


def commit_record(folder: Path) -> Loader:
    record = CommitRecord(10, folder_of(10, "0" * 16), 1, 1, 2.5)
    remote = RemoteCheckpoints.of(f"file://{folder}", "run")
    (folder / "run").mkdir()
    return Loader(folder / "run" / record.name, record.text(), lambda: remote.check(10, {f"{record.folder}/x": 1}))


MAKERS = {
    maker.__name__: maker
    for maker in (
        *(job, json_job, words, cluster, schedule, rows, outcome, metrics, progress, index, shard, jsonl, text),
        *(
            hugging_face,
            megatron_script,
            primus_yaml,
            titan_toml,
            axolotl_yaml,
            bridge_recipe,
            number,
            char,
            library,
            manifest,
            commit_record,
            tensors,
            consolidated,
            dcp,
            gguf,
            gguf_sentencepiece,
        ),
    )
}
"""All loaders; each is made with a folder for its files."""
