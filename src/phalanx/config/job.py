"""The Job: a model, a cluster and a layout, with data, optimizer and the options of a run. Every verb takes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from phalanx.config.added import Techniques
from phalanx.config.cluster import Cluster
from phalanx.config.constraints import Example, FolderName, Interval, Matches, Printable, StoreUrl
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.config.precision import Fp8Scaling, Precision
from phalanx.config.values import FieldRow


@dataclass(frozen=True)
class Checkpoint:
    """Saving and resuming."""

    every: Annotated[int, Interval(0), Example("500")] = 0
    """Steps between checkpoints; 0: only by `every_minutes`, at the end and when stopped."""
    every_minutes: Annotated[float, Interval(0), Example("30")] = 10.0
    """Minutes between checkpoints, by the clock of rank 0; 0: only by `every`, at the end and when stopped."""
    memory_every: Annotated[int, Interval(0), Example("10")] = 0
    """Steps between copies of the state in the memory of its node and of the next node; 0: none. A restart resumes from
    the newest one, or from storage if that is newer."""
    keep: Annotated[int, Interval(0)] = 2
    """Newest whole checkpoints kept; older ones are deleted. 0 keeps all."""
    keep_every: Annotated[int, Interval(0), Example("5000")] = 0
    """Checkpoints after every so many steps are kept for ever, whatever `keep` says; 0: none."""
    keep_best: bool = False
    """Keep the checkpoint with the lowest validation loss, too."""
    verify: bool = True
    """Check every file's digest when loading."""
    background: bool = True
    """Write checkpoints while training goes on, from a copy in host memory; each rank needs as much as it writes."""
    on_failure: Literal["continue", "stop"] = "continue"
    """If a checkpoint cannot be written: warn and train on while there is an earlier one, or stop."""
    timeout_s: Annotated[float, Interval(above=0)] = 300.0
    """Seconds without progress after which storage is said to hang, and a checkpoint is given up."""
    stripes: Annotated[int | Literal["auto"], Interval(0), Example("8")] = "auto"
    """On Lustre: storage targets that each file is spread over. auto: one per GiB of the file, as long as the ranks'
    files together have targets enough; 0: as the folder is set. Elsewhere it does nothing."""
    remote: Annotated[str, StoreUrl(), Example("s3://bucket/runs")] = ""
    """Object store that checkpoints are copied to: s3://BUCKET/PREFIX, or another URL of fsspec. The run's are in a
    folder with its name. Credentials come from the environment."""


IGNORE = -100
"""A target that is not counted in the loss (torch's ignore_index)."""


@dataclass(frozen=True, repr=False)
class MixSource(FieldRow):
    """One source of data.mix."""

    path: str
    """What data.path takes."""
    weight: Annotated[float, Interval(above=0)]
    """Its share of the samples, relative to the other sources' weights."""
    epochs: Annotated[float, Interval(0)] = 0.0
    """The most passes over it: a run that needs more is refused; 0: as many as it needs."""
    corpus: Literal["", "text", "chat", "preferences"] = ""
    """The kind of its content. Empty: that of data.corpus, or text if that is not set either."""
    columns: tuple[str, ...] = ()
    """Instead of data.columns."""
    ignore_keys: tuple[str, ...] = ()
    """Instead of data.ignore_keys."""


@dataclass(frozen=True)
class Data:
    """The data: a corpus and a tokenizer."""

    corpus: Annotated[str, Example("shakespeare_char")] = "stdlib"
    """stdlib (the text of this Python's own library, nothing to download), shakespeare_char, text (your own: set
    data.path), chat (your own conversations, for fine-tuning: set data.path), prompts (with answers, for GRPO: set
    data.path), or random (tokens without text, for measuring)."""
    path: Annotated[str, Example("corpus.jsonl")] = ""
    """A text or JSONL file, or a folder of them (corpora text and chat); a Megatron data set (corpus text): its .bin,
    .idx or the name without either; or a local copy of tiny Shakespeare."""
    mix: Annotated[tuple[MixSource, ...], Example("[{path: books, weight: 3}, {path: code.jsonl, weight: 1}]")] = ()
    """Instead of path: several sources, drawn by weight, of text or of what corpora chat and preferences read. Each has
    a path, a weight (its share of the samples, relative to the others') and epochs (the most passes over it; a run that
    needs more is refused; 0: as many as it needs), and may have a corpus (text among conversations), columns and
    ignore_keys of its own."""
    text_field: Annotated[str, Example("content")] = "text"
    """The field of each record (JSON, or a column of CSV, TSV, Parquet, Arrow) that holds the text of corpus text."""
    columns: tuple[str, ...] = ()
    """Names of columns of rows (corpora chat, preferences, prompts) by the names here: [question:prompt,
    answer:completion]."""
    ignore_keys: tuple[str, ...] = ()
    """Fields of such rows that are left out on purpose, those of messages as messages.NAME; others that no reader knows
    are errors."""
    tokenizer: Annotated[str, Example("bpe")] = "char"
    """char, byte, bpe (trained on the corpus), or the path of a tokenizer.json, tekken.json, tokenizer.model or
    *.tiktoken."""
    bpe_vocab: Annotated[int, Interval(1)] = 4096
    """Vocabulary size to train for tokenizer bpe."""
    document_mask: bool = False
    """A token attends only to tokens of its own document: those since the last separator, which is the tokenizer's
    end-of-text token or, where it has none (char, byte), a newline, so that every line is a document."""
    document_tokens: Annotated[int, Interval(0)] = 0
    """Mean tokens of a document, of log-normal lengths, from which predictions take what attention computes and sends
    under document_mask. 0: the documents of the prepared data, or whole sequences if it is not prepared."""
    template: Annotated[str, Example("chatml")] = "tokenizer"
    """How corpus chat makes a text of a conversation: tokenizer (by the chat template that comes with data.tokenizer),
    chatml, llama3, alpaca, raw (contents alone), or the path of a Jinja file."""
    template_date: str = ""
    """The day that a template's strftime_now writes, such as 2026-01-31; empty: the one that is recorded beside the
    tokenizer, or 2024-07-26."""
    loss_on: Literal["answers", "all"] = "answers"
    """Tokens of corpus chat that count in the loss: those of the answers, or all."""
    packing: bool = False
    """Pack whole conversations of corpus chat, or documents of a text, into samples by best fit, each attending only to
    itself (needs document_mask). Documents longer than a sample are cut. Otherwise a sample is one conversation and
    padding, or the next model.seq_len tokens of a text."""
    too_long: Literal["truncate", "drop"] = "truncate"
    """What to do about a conversation of corpus chat that is longer than model.seq_len: keep its beginning, or leave it
    out."""
    val_fraction: Annotated[float, Interval(0), Interval(below=1)] = 0.1
    """Share of the corpus, or of each source of a mixture, from its end, kept for validation."""
    limit_mb: Annotated[float, Interval(0), Interval(below=1e12), Example("100")] = 0.0
    """Use only this many megabytes of the text of the corpus, or of each source of a mixture; 0 means all."""
    dir: Annotated[str, Example("/scratch/data")] = "data"
    """Folder of the prepared token shards."""
    random_tokens: Annotated[int, Interval(1)] = 1_000_000
    """Corpus random: number of tokens."""
    random_vocab: Annotated[int, Interval(1, 2**24)] = 256
    """Corpus random: vocabulary size."""
    workers: Annotated[int, Interval(0)] = 0
    """Processes that tokenize in `phalanx data prepare`; 0: one per core."""
    prefetch: Annotated[int, Interval(0)] = 4
    """Steps whose batches are read ahead in the background."""
    readers: Annotated[int | Literal["auto"], Interval(0), Example("2")] = 0
    """Most ranks that read training samples from storage, each once, and send the others theirs; one per data rank is
    the most that there is. 0: every rank reads its own, so that those of tp, cp and pp read the same. auto: what is
    fastest at the start of the run, 0 unless few readers take half as long. Predictions take data for read ahead."""
    on_corruption: Literal["stop", "skip"] = "stop"
    """What to do about a block of a token shard that does not match its digest: stop when it is read, or check all
    blocks at the start and read other samples instead of the damaged ones, the same ones in any layout."""
    skip_quota: Annotated[int, Interval(0)] = 100
    """Samples of a split that on_corruption=skip may replace; more stop the run."""


@dataclass(frozen=True)
class DpoOptions:
    """Direct preference optimisation, which corpus preferences trains with (docs/guides/preference-tuning.md)."""

    beta: Annotated[float, Interval(above=0), Interval(below=1e6)] = 0.1
    """Strength of the tie to the reference model: rewards are beta × log(probability / the reference's)."""
    label_smoothing: Annotated[float, Interval(0), Interval(below=0.5)] = 0.0
    """Share of the pairs that are taken to be labelled wrongly (conservative DPO)."""

    def line(self) -> str:
        """Returns the options as `name=value`, without those that do nothing."""
        return f"beta={self.beta:g}" + (f",label_smoothing={self.label_smoothing:g}" if self.label_smoothing else "")


@dataclass(frozen=True)
class GrpoOptions:
    """Group relative policy optimisation, which corpus prompts trains with (docs/guides/grpo.md)."""

    group: Annotated[int, Interval(2)] = 8
    """Completions per prompt; train.global_batch counts completions."""
    reward: Annotated[str, Example("rewards:score")] = "exact"
    """What scores a completion: exact (it is the answer, white space aside), number (its last number equals the
    answer), regex (what `pattern` finds in it is the answer), or your own function, MODULE:FUNCTION of the current
    folder or an installed package, which gets prompt, completion and answer and returns a number."""
    pattern: Annotated[str, Example("#### (-?[0-9]+)")] = ""
    """reward=regex: the expression whose last match, or its first group, is compared with the answer."""
    max_new_tokens: Annotated[int, Interval(1)] = 64
    """Most tokens of a completion, which also ends at an end-of-text token and at model.seq_len."""
    temperature: Annotated[float, Interval(above=0)] = 1.0
    """Divides the logits that completions are drawn from. The loss, its ratio and the KL divergence are of the same
    probabilities."""
    updates: Annotated[int, Interval(1)] = 1
    """Optimizer steps per batch of completions."""
    clip: Annotated[float, Interval(above=0), Interval(below=1)] = 0.2
    """The ratio of probabilities counts up to 1 - clip and 1 + clip."""
    clip_high: Annotated[float, Interval(0)] = 0.0
    """The same above 1 (DAPO's clip-higher); 0: as clip."""
    beta: Annotated[float, Interval(0)] = 0.04
    """Strength of the tie to the reference model, by the KL divergence; 0: there is none, and no memory for it."""
    scale: Literal["std", "none"] = "std"
    """Divide advantages by the standard deviation of their group's rewards, or not (Dr. GRPO)."""
    average: Literal["sequence", "token", "constant"] = "sequence"
    """The loss is the mean over a sequence's tokens, then over sequences; over all tokens (DAPO); or the sum over
    tokens divided by max_new_tokens (Dr. GRPO)."""
    max_batch: Annotated[int, Interval(1)] = 64
    """Completions that a replica generates at a time."""
    max_gap: Annotated[float, Interval(0)] = 0.0
    """Most difference between a token's log-probabilities in generation and in training; 0: by the precision, 1e-9 for
    fp64, 1e-3 for fp32, 0.5 for 16 bits."""
    on_gap: Literal["stop", "warn"] = "stop"
    """What follows a larger difference."""

    def line(self) -> str:
        """Returns the options as `name=value`, without those that do nothing."""
        high = f",clip_high={self.clip_high:g}" if self.clip_high else ""
        warmth = f",temperature={self.temperature:g}" if self.temperature != 1 else ""
        return (
            f"group={self.group},updates={self.updates},clip={self.clip:g}{high},beta={self.beta:g},scale={self.scale},"
            f"average={self.average}{warmth}"
        )


MOST_STEPS = 20
"""Most steps of a profile: a rank's trace of one step takes from a megabyte to hundreds."""
MOST_TRACED = 16
"""Most ranks that write a trace with ranks=all."""


@dataclass(frozen=True)
class ProfileOptions:
    """A profile of some steps, in the run's folder traces (docs/guides/profile.md)."""

    steps: Annotated[tuple[int, int], Interval(0), Example("[10, 12]")] = (0, 0)
    """First and last step to profile, such as [10, 12]; steps count from 1. [0, 0]: none."""
    ranks: Annotated[Literal["all"] | tuple[int, ...], Example("[0, 3]")] = "all"
    """Ranks that write traces: all (of more than 16 the first 16), or a list such as [0, 3]."""
    memory: bool = False
    """Record allocations: the largest tensors at the peak, beside the prediction; on CUDA also a memory snapshot."""
    python: bool = False
    """Sample the Python side with pyinstrument, as text and HTML."""

    @property
    def is_on(self) -> bool:
        """Whether any step is profiled."""
        return self.steps != (0, 0)

    def traced(self, world: int) -> tuple[int, ...]:
        """Returns the ranks, of `world`, that write traces."""
        return tuple(range(min(world, MOST_TRACED))) if self.ranks == "all" else self.ranks


@dataclass(frozen=True)
class GuardOptions:
    """Silent corruption, loss spikes and NaN: how they are found, and what follows."""

    every: Annotated[int, Interval(0)] = 100
    """Steps between comparisons of parameters, moments and gradients with their replicas on other ranks; each
    checkpoint is preceded by one. 0: none. Nothing is compared where replicas train independently (sync other than
    bsp) or steps overlap (schedule=pipedream)."""
    repeat_every: Annotated[int, Interval(0), Example("100")] = 0
    """Steps between steps that are computed twice although nothing makes them doubtful, which finds what makes neither
    loss nor norm jump: 1 finds every transient fault at twice the time, 100 one in a hundred, and a core that often
    computes wrongly, for 1 %. 0: none."""
    on_corruption: Literal["rewind", "heal", "stop"] = "rewind"
    """If replicas differ: rewind loads the newest checkpoint and trains on from there; heal copies what differs from a
    majority of the replicas and rewinds if there is none; stop ends the run with exit code 4."""
    on_spike: Literal["off", "skip", "rewind", "stop"] = "off"
    """If loss or gradient norm jump, and a second computation of the step agrees: skip leaves the step's samples out;
    rewind loads the newest checkpoint and continues with the samples after the spike; stop ends the run with exit
    code 5; off looks for none."""
    on_nan: Literal["stop", "skip", "rewind"] = "stop"
    """If loss or gradients are not finite, and a second computation agrees; as on_spike."""
    spike_norm: Annotated[float, Interval(above=1)] = 5.0
    """A gradient norm above this multiple of its running median is a spike."""
    spike_loss: Annotated[float, Interval(above=1)] = 1.5
    """A loss above this multiple of its running median is a spike."""
    spike_window: Annotated[int, Interval(2, 4096)] = 64
    """Steps of the running medians."""
    spike_warmup: Annotated[int, Interval(1)] = 100
    """Steps at the start of a run in which nothing counts as a spike."""
    limit: Annotated[int, Interval(0)] = 10
    """Steps skipped, rewinds and heals in any 1,000 steps; one more stops the run."""


@dataclass(frozen=True)
class Optimizer:
    """The optimizer with its options, and its learning rate. docs/techniques/optimizers.md says which reads what."""

    name: Annotated[str, Example("muon")] = "adamw"
    """adamw, sgd, lion, muon, or one that a package adds."""
    lr: Annotated[float, Interval(above=0), Example("3e-4")] = 1e-3
    """Peak learning rate, before batch_scaling."""
    betas: Annotated[tuple[float, float], Interval(0, below=1), Example("[0.9, 0.98]")] = (0.9, 0.95)
    """adamw: decay of the first and second moment; lion: of the step's interpolation and the momentum."""
    eps: Annotated[float, Interval(above=0)] = 1e-8
    """Added to the root of the second moment; lion: elements that are not above it take no step."""
    momentum: Annotated[float, Interval(0, below=1)] = 0.9
    """sgd, muon: decay of the momentum; 0 for none."""
    nesterov: bool = False
    """sgd, muon: Nesterov's momentum."""
    newton_schulz: Literal["master", "bf16"] = "master"
    """muon: precision in which matrices are orthogonalised: that of the optimizer's weights, or bf16."""
    state: Literal["fp32", "bf16", "8bit"] = "fp32"
    """adamw, sgd, lion: format of the moments: fp32 (fp64 with precision fp64), bf16, or codes of 8 bits with a scale
    per block of a row."""
    master: Literal["fp32", "none"] = "fp32"
    """adamw, sgd, lion: whether parameters in bf16 have a copy in fp32, which updates change; none: updates change the
    parameters themselves."""
    rounding: Literal["stochastic", "nearest", "kahan"] = "stochastic"
    """How an update rounds to bf16 (state=bf16, master=none): stochastic, whose mean is exact; nearest, which loses
    changes below 1/256 of a number; or kahan: what rounding cuts off a parameter is kept, in two bytes more (moments:
    stochastic)."""
    options: Annotated[str, Example("rho=0.04")] = ""
    """Numbers for an optimizer that a package adds, such as rho=0.04,period=10."""
    weight_decay: Annotated[float, Interval(0)] = 0.1
    """Decay of matrices and embeddings; biases and norms are not decayed."""
    clip: Annotated[float, Interval(0)] = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Decay of the rate after the warm-up; wsd holds it, then decays over the last decay_fraction."""
    warmup_steps: Annotated[int, Interval(0), Example("100")] = 0
    """Steps over which the rate rises linearly from 0."""
    decay_steps: Annotated[int, Interval(0), Example("1000")] = 0
    """Step at which the rate reaches its minimum; 0 means train.steps. A run that resumes with other train.steps
    keeps the step that it was."""
    decay_fraction: Annotated[float, Interval(0, 1)] = 0.2
    """wsd: the share of decay_steps that decays (Hu et al. 2024, section 4)."""
    min_lr_ratio: Annotated[float, Interval(0, 1)] = 0.1
    """The smallest rate, as a share of the peak."""
    outer_lr: Annotated[float, Interval(above=0)] = 0.7
    """diloco: learning rate of the outer step (Douillard et al. 2023)."""
    outer_momentum: Annotated[float, Interval(0, below=1)] = 0.9
    """diloco: Nesterov momentum of the outer step; 0 makes it plain SGD."""
    batch_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply the rate by global batch / base_batch (Goyal et al. 2017) or its square root (Krizhevsky 2014)."""
    base_batch: Annotated[int, Interval(0), Example("256")] = 0
    """batch_scaling: the global batch, in sequences, for which lr was chosen."""

    @property
    def is_narrow(self) -> bool:
        """Whether moments, or parameters that updates change, have fewer bits than fp32."""
        return self.state != "fp32" or self.master == "none"

    @property
    def compensates(self) -> bool:
        """Whether what rounding cuts off a parameter is kept."""
        return self.master == "none" and self.rounding == "kahan"


_NODES = Matches("[1-9][0-9]{0,4}(:[1-9][0-9]{0,4})?", "a number of nodes, such as 2, or a range of it, such as 1:2")
_ENDPOINT = Matches(r"[^\s:]+:[0-9]{1,5}|\[[0-9a-fA-F:.]+\]:[0-9]{1,5}", "HOST:PORT, such as node-a:29400")


@dataclass(frozen=True)
class RunOptions:
    """The run's name, place and processes."""

    name: Annotated[str, FolderName(longest=200), Example("first")] = ""
    """Name of the run; empty means the job file's name. Its directory is dir/name."""
    dir: Annotated[str, Printable(), Example("/scratch/runs")] = "runs"
    """Folder of the run directories."""
    threads: Annotated[int, Interval(0)] = 0
    """CPU threads of each process; 0 divides the cores among the processes of a node."""
    device_budget_mib: Annotated[float, Interval(0), Example("512")] = 0.0
    """On a CPU: MiB of tensors that each rank may have as on a device of that size; what layout.offload keeps on the
    host does not count. Every tensor is counted, which takes time. 0: no limit."""
    timeout_s: Annotated[float, Interval(above=0)] = 600.0
    """Seconds that a collective may wait before the run is declared broken."""
    hang_s: Annotated[float, Interval(0)] = 0.0
    """Seconds without a sign of life after which the watchdog names a rank and ends the run. 0 follows the run: 5 of
    its longest steps, 2 of its longest saves, validations and first steps, at least 20, at most half of timeout_s.
    Until the first step is done, and after the last one, timeout_s counts."""
    grace_s: Annotated[float, Interval(above=0)] = 30.0
    """Seconds from a signal to stop until the ranks are killed: as long as a step and a checkpoint take. Ask the
    scheduler for a little more."""
    max_restarts: Annotated[int, Interval(0)] = 3
    """Restarts, within restart_window_s, of ranks that were killed, crashed or hang. They resume from the newest valid
    checkpoint. A run of one process has no launcher and is restarted only if this is set."""
    min_replicas: Annotated[int, Interval(0), Example("1")] = 0
    """Replicas (dp_replicate) without which the run waits: each is started again alone, while the others go on with the
    whole batch, and copies their state when it is back. 0: the loss of a rank restarts all of them."""
    sync_grace_s: Annotated[float, Interval(0)] = 10.0
    """With min_replicas and sync=diloco: seconds for which so many replicas wait for the others before they
    synchronise. One that comes later copies their state."""
    restart_window_s: Annotated[float, Interval(above=0)] = 3600.0
    """Seconds after which a restart no longer counts against max_restarts."""
    nnodes: Annotated[str, _NODES, Example('"1:2"')] = ""
    """Nodes of a run with one Phalanx launcher each: 2, or 1:2 for between one and two. Give every node the
    same command. Empty: this machine alone, or the processes of another launcher."""
    rdzv_endpoint: Annotated[str, _ENDPOINT, Example("node-a:29400")] = ""
    """HOST:PORT where the nodes meet, with nnodes. The node to which HOST belongs is the host, without which there is
    no run. Its port asks for the key in the run directory; nothing is encrypted: use a private network."""
    node_lost_s: Annotated[float, Interval(above=0)] = 10.0
    """Seconds without a sign of life after which a node is lost, and the others go on without it."""
    trackers: Annotated[tuple[str, ...], Example("[tensorboard]")] = ()
    """Where metrics go besides metrics.jsonl: a list of tensorboard, wandb, mlflow, and what packages add."""
    trackers_wait_s: Annotated[float, Interval(0)] = 30.0
    """Most seconds that a finished run waits until its trackers have sent everything; a stopped one waits 3 at most."""
    metrics_port: Annotated[int, Interval(0, 65535), Example("9400")] = 0
    """Port of rank 0 at which Prometheus reads a running job's newest figures, http://HOST:PORT/metrics; 0: none."""
    metrics_host: Annotated[str, Printable(), Example("0.0.0.0")] = "127.0.0.1"
    """Address of metrics_port: only this machine can read it unless you name another, such as 0.0.0.0 for all."""
    report: bool = True
    """Write report.html and loss.svg into the run's directory, and renew them while it trains."""
    live: bool = True
    """On a terminal, show the run as a screen that is renewed in place; false shows plain lines, as elsewhere."""
    log_level: Literal["debug", "info", "warning"] = "info"
    """Log level of rank 0 on the terminal; other ranks write to their own log files."""
    all_ranks: bool = False
    """Show the log lines of every rank, with the rank in front."""
    sample_tokens: Annotated[int, Interval(0)] = 200
    """Tokens of text to generate when training ends; 0 generates none."""
    sample_prompt: Annotated[str, Example('"def "')] = "\n"
    """Prompt of that text."""

    @property
    def least_nodes(self) -> int:
        """Nodes without which the run waits; 1 without nnodes."""
        return int(self.nnodes.partition(":")[0] or 1)

    @property
    def most_nodes(self) -> int:
        """Nodes that the layout is for; 1 without nnodes."""
        return int(self.nnodes.rpartition(":")[2] or 1)

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port of rdzv_endpoint."""
        host, _, port = self.rdzv_endpoint.rpartition(":")
        return host.removeprefix("[").removesuffix("]"), int(port)

    @property
    def hang_limit_s(self) -> float:
        """Most seconds without a sign of life after which a rank hangs."""
        return self.hang_s or self.timeout_s / 2


_RAMP = Matches(
    r"[1-9][0-9]{0,8}\*[1-9][0-9]{0,8}(\+[1-9][0-9]{0,8}\*[1-9][0-9]{0,8})*",
    "numbers of steps with their sizes, such as 100*64+100*128",
)


@dataclass(frozen=True)
class Train:
    """The training loop."""

    steps: Annotated[int, Interval(1), Example("1000")] = 200
    """Optimizer steps."""
    global_batch: Annotated[int, Interval(0), Example("256")] = 0
    """Sequences per step over all ranks = micro-batch × accumulation × data ranks; 0: follows from the layout."""
    batch_ramp: Annotated[str, _RAMP, Example("100*64+100*128")] = ""
    """Smaller global batches at the beginning: 100 steps of 64 sequences, 100 of 128, then global_batch. Learning rates
    and all numbers of steps count steps, also small ones; batch_scaling follows the batch."""
    seq_ramp: Annotated[str, _RAMP, Example("100*512+200*1024")] = ""
    """Shorter sequences at the beginning: 100 steps with sequences of 512 tokens, 200 of 1024, then model.seq_len. Each
    sample is cut into equal parts, so that a step has as many tokens."""
    precision: Precision = "fp32"
    """Precision of parameters, activations and gradients; bf16 and fp16 keep fp32 master weights. fp8: bf16, with the
    matrix products of blocks in 8 bits. auto: bf16 where the device multiplies that faster, as described or measured by
    `phalanx bench compute`, or else by the processor's instructions; otherwise fp32."""
    fp8_scaling: Fp8Scaling = "rowwise"
    """precision=fp8: one scale per row of each factor, one per tensor, or one per 32 elements of a row (Blackwell)."""
    gradients: Literal["same", "fp32"] = "same"
    """Precision in which gradients are summed over ranks (and, in flat buckets, over micro-batches): that of training,
    or fp32 for twice the memory and traffic of bf16."""
    seed: Annotated[int, Interval(0)] = 1337
    """The one seed: weights, order of samples, dropout and noise derive from it by hashing."""
    compile: bool | Literal["auto"] = "auto"
    """Compile blocks (once per kind), embedding, final norm and loss with torch.compile; it saves no logits in fp32.
    auto does on GPUs, where torch can."""
    cpu_linear: Literal["auto", "mkl", "onednn"] = "auto"
    """Library for fp32 matrix products on a CPU; auto uses oneDNN on non-Intel processors with AVX-512, with one thread
    per rank for attention, too."""
    deterministic: bool = False
    """Ask torch for deterministic kernels only (a CPU run is deterministic anyway)."""
    log_every: Annotated[int, Interval(1)] = 10
    """Steps between log lines; every step goes to metrics.jsonl."""
    label_smoothing: Annotated[float, Interval(0), Interval(below=1), Example("0.1")] = 0.0
    """Share of each target that is spread evenly over the vocabulary, in the loss of training; that of validation is
    without."""
    neftune_alpha: Annotated[float, Interval(0), Example("5")] = 0.0
    """Add uniform noise of up to alpha / sqrt(seq_len × d_model) to the embeddings in training (NEFTune; 5 to 15 are
    usual in fine-tuning); 0: none."""
    eval_every: Annotated[int, Interval(0), Example("100")] = 0
    """Steps between validations; 0: only at the end."""
    eval_samples: Annotated[int, Interval(0)] = 256
    """Sequences of the validation split per validation (at most the whole split)."""
    mtp_weight: Annotated[float, Interval(0), Example("0.1")] = 0.3
    """model.mtp: factor of the mean loss of the modules for further tokens beside the main loss (DeepSeek-V3, section
    2.2, equation 25: 0.3, and 0.1 for the last third of its tokens)."""
    dpo: DpoOptions = field(default_factory=DpoOptions)
    grpo: GrpoOptions = field(default_factory=GrpoOptions)
    profile: ProfileOptions = field(default_factory=ProfileOptions)


@dataclass(frozen=True)
class PlanOptions:
    """The planner's choice of a layout."""

    headroom: Annotated[float, Interval(0, below=1)] = 0.06
    """Share of a device's memory that a planned layout leaves free beyond the upper end of the predicted interval. If
    no layout does, the plan says so; what fills the device is listed as an alternative."""


@dataclass(frozen=True)
class Job:
    """One job: what to train, on what, how spread, and how long."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cluster: Cluster = field(default_factory=Cluster)
    layout: Layout = field(default_factory=Layout)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    train: Train = field(default_factory=Train)
    plan: PlanOptions = field(default_factory=PlanOptions)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    guard: GuardOptions = field(default_factory=GuardOptions)
    run: RunOptions = field(default_factory=RunOptions)
    techniques: Techniques = field(default_factory=Techniques)
