"""The shape of a decoder-only transformer: numbers only, no tensors.

One dataclass covers the GPT-2 kind (LayerNorm, learned positions, GELU, biases) and the Llama kind (RMSNorm, RoPE,
SwiGLU, grouped-query attention), with mixture-of-experts and multi-head latent attention as parts that are off by
default. `parameters.py` beside this file derives every parameter's name and shape from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Annotated, Literal

from phalanx.config.constraints import Example, Interval, Printable
from phalanx.hashed import Hashed, hashed_once


@dataclass(frozen=True)
class RopeScaling:
    """Stretching rotary positions beyond the trained context (factor 1 = off)."""

    kind: Literal["linear", "llama3", "yarn", "longrope"] = "llama3"
    """linear: divide positions by the factor (Chen et al. 2023); llama3: by frequency band (Llama 3.1); yarn: by
    frequency band, with larger queries and keys (Peng et al. 2023, section 3); longrope: each pair's frequency by a
    number of its own (Ding et al. 2024; Phi-3 and 4)."""
    factor: Annotated[float, Interval(1), Example("8")] = 1.0
    """Factor by which the context becomes longer; 1 switches scaling off."""
    low_freq_factor: Annotated[float, Interval(above=0)] = 1.0
    """llama3: wavelengths above original_seq_len / this are fully stretched."""
    high_freq_factor: Annotated[float, Interval(above=0)] = 4.0
    """llama3: wavelengths below original_seq_len / this are left alone."""
    original_seq_len: Annotated[int, Interval(1)] = 8192
    """llama3, yarn, longrope: the context length in tokens before stretching."""
    beta_fast: Annotated[float, Interval(above=0)] = 32.0
    """yarn: frequencies that turn at least this often within the original context are left alone."""
    beta_slow: Annotated[float, Interval(above=0)] = 1.0
    """yarn: frequencies that turn at most this often within it are fully stretched."""
    truncate: bool = True
    """yarn: the band between the two begins and ends at whole pairs (gpt-oss: false)."""
    magnitude: Annotated[float, Interval(0)] = 0.0
    """yarn, longrope: multiplies the rotated queries and keys; 0 means 0.1 ln(factor) + 1, with longrope
    √(1 + ln(factor) / ln(original_seq_len))."""
    short: Annotated[tuple[float, ...], Example("[1.0, 1.1]")] = ()
    """longrope: what divides the frequency of each pair while model.seq_len is at most original_seq_len."""
    long: Annotated[tuple[float, ...], Example("[1.0, 40.0]")] = ()
    """longrope: the same for a larger model.seq_len."""


@dataclass(frozen=True)
class MoE:
    """Mixture of experts in place of the MLP (n_experts 0 = dense)."""

    n_experts: Annotated[int, Interval(0), Example("8")] = 0
    """Routed experts per layer; 0 means a dense model."""
    top_k: Annotated[int, Interval(1)] = 2
    """Routed experts that each token visits."""
    d_ff: Annotated[int, Interval(0), Example("1024")] = 0
    """Hidden width of one expert; 0 means model.d_ff."""
    n_shared: Annotated[int, Interval(0), Example("1")] = 0
    """Experts that every token visits beside the routed ones."""
    n_dense_layers: Annotated[int, Interval(0), Example("1")] = 0
    """Leading layers that keep a dense MLP of width model.d_ff."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of the router: a softmax over the experts (Mixtral), or a sigmoid per expert (DeepSeek-V3)."""
    renormalise: bool = True
    """The gates of a token's experts add up to 1 (Mixtral, DeepSeek-V3); otherwise the scores themselves are the gates
    (Switch Transformer, which with top_k 1 needs them)."""
    route_scale: Annotated[float, Interval(above=0)] = 1.0
    """Multiplies the gates (DeepSeek-V3: 2.5)."""
    n_groups: Annotated[int, Interval(1)] = 1
    """Groups of neighbouring experts, for routing limited to some of them (DeepSeek-V3, section 2.1.2)."""
    top_groups: Annotated[int, Interval(1)] = 1
    """Groups that a token's experts may lie in: those whose two best scores have the largest sum."""
    aux_loss: Annotated[float, Interval(0), Example("0.01")] = 0.0
    """Coefficient of the load-balancing loss, per sequence or conversation (DeepSeek-V3, equations 17 to 20)."""
    z_loss: Annotated[float, Interval(0), Example("0.001")] = 0.0
    """Coefficient of the squared logarithm of the softmax's denominator (ST-MoE, Zoph et al. 2022, equation 5)."""
    latent: Annotated[int, Interval(0), Example("1024")] = 0
    """Width in which experts work: one matrix before them maps the residual stream to it, one after them back
    (LatentMoE of Nemotron 3, NVIDIA 2025); 0 means model.d_model."""
    scale_inputs: bool = False
    """The gates multiply what experts read, not what they return (Llama 4)."""
    shared_gate: bool = False
    """The output of the shared experts is multiplied by the sigmoid of a trained score per token (Qwen3-Next)."""
    own_norms: bool = False
    """Router, routed and shared experts read the normalised residual stream through weights of their own, outputs of
    routed and of shared experts are normalised before their sum, and each expert's gates have a trained factor (Gemma
    4)."""
    router_bias: bool = False
    """The router's logits have a trained bias per expert (gpt-oss)."""
    bias_balanced: bool = False
    """The router keeps a balancing bias per expert (DeepSeek-V3, section 2.1.2)."""
    bias_rate: Annotated[float, Interval(0)] = 0.001
    """bias_balanced: amount per step by which an expert's bias rises at too low a load, and falls at too high a one."""
    capacity: Annotated[float, Interval(0), Example("1.25")] = 0.0
    """Tokens of a sequence that one expert takes, as a multiple of its even share seq_len × top_k / n_experts, rounded
    up; later tokens go without that expert. 0 drops none."""

    def most_tokens(self, seq_len: int) -> int:
        """Returns the most tokens of a sequence of `seq_len` tokens that one expert takes."""
        if not self.capacity:
            return seq_len
        # Rounded first: 1.1 × 10 is a little more than 11.
        return min(seq_len, ceil(round(self.capacity * seq_len * self.top_k / self.n_experts, 6)))


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention (DeepSeek-V2, section 2.1); kv_rank 0 = ordinary attention."""

    q_rank: Annotated[int, Interval(0), Example("1536")] = 0
    """Rank of the query compression; 0 projects queries directly."""
    kv_rank: Annotated[int, Interval(0), Example("512")] = 0
    """Rank of the key/value compression; 0 switches latent attention off."""
    rope_head_dim: Annotated[int, Interval(1)] = 64
    """Size of the part of a head that carries the rotary position."""
    nope_head_dim: Annotated[int, Interval(1)] = 128
    """Size of the part of a head without position."""
    v_head_dim: Annotated[int, Interval(1)] = 128
    """Size of a value head."""
    norm_eps: Annotated[float, Interval(0)] = 0.0
    """Added to the variance in the norms of the compressed queries, keys and values; 0 means model.norm_eps
    (transformers: 1e-6 whatever that is)."""


@dataclass(frozen=True)
class SparseAttention:
    """Latent attention to the keys that an indexer chooses (DeepSeek-AI 2025, arXiv 2512.02556, section 2.1); top_k 0 =
    to all of them."""

    top_k: Annotated[int, Interval(0), Example("2048")] = 0
    """Keys that a query attends to; 0 switches the indexer off."""
    index_heads: Annotated[int, Interval(1)] = 64
    """Query heads of the indexer, which share one key head."""
    index_head_dim: Annotated[int, Interval(1)] = 128
    """Size of a head of the indexer."""
    dense_warmup: bool = False
    """The stage before: queries attend to all keys, the indexer alone is trained, and all other weights are frozen."""
    index_loss: Annotated[float, Interval(0)] = 1.0
    """Coefficient of the indexer's loss, the KL divergence of its scores from the mean of the heads' probabilities."""


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta net, a linear attention (Yang et al. 2025, arXiv 2412.06464); n_heads 0 = none.

    Its kind of attention is `delta`: delta,delta,delta,gated_heads repeats over the layers of Qwen3-Next."""

    n_heads: Annotated[int, Interval(0), Example("32")] = 0
    """Value heads, each with a state of its own; 0: no layer is of this kind."""
    key_heads: Annotated[int, Interval(1)] = 16
    """Query and key heads, which value heads share."""
    key_head_dim: Annotated[int, Interval(1)] = 128
    """Size of a query or key head."""
    head_dim: Annotated[int, Interval(1)] = 128
    """Size of a value head."""
    conv: Annotated[int, Interval(1)] = 4
    """Tokens that the convolution over queries, keys and values reads."""


@dataclass(frozen=True)
class Mamba:
    """Mamba-2, a state space model (Dao and Gu 2024, arXiv 2405.21060); n_heads 0 = none. Its kind of attention is
    `mamba`."""

    n_heads: Annotated[int, Interval(0), Example("64")] = 0
    """Heads, each with a state of its own; 0: no layer is of this kind."""
    head_dim: Annotated[int, Interval(1)] = 64
    """Size of a head."""
    groups: Annotated[int, Interval(1)] = 8
    """Groups of heads that share what writes their states and what reads them (B and C)."""
    state: Annotated[int, Interval(1)] = 128
    """Size of a state per element of a head."""
    conv: Annotated[int, Interval(1)] = 4
    """Tokens that the convolution reads."""
    chunk: Annotated[int, Interval(1)] = 128
    """Tokens of a chunk, within which tokens meet in matrix products, and between which states pass."""


@dataclass(frozen=True)
class WideHeads:
    """Heads of another size, by default in the layers that attend to all keys (Gemma 4); head_dim 0 = none. Their kind
    of attention is `wide_heads`."""

    head_dim: Annotated[int, Interval(0), Example("512")] = 0
    """Size of a head there; 0: all layers have model.head_dim."""
    n_kv_heads: Annotated[int, Interval(0), Example("4")] = 0
    """Key/value heads there; 0 means model.n_kv_heads."""


@dataclass(frozen=True)
class QueryGrowth:
    """Queries at position p, after their rotation, are multiplied by 1 + rate ln(1 + floor((p + first) / length)), so
    that attention stays sharp over long contexts (Nakanishi 2025, arXiv 2501.19399, as Llama 4 and Ministral 3 have
    it); with nope_every in layers without rotary positions alone."""

    rate: Annotated[float, Interval(0), Example("0.1")] = 0.0
    """The rate of growth (Llama 4: 0.1); 0 switches it off."""
    length: Annotated[int, Interval(1)] = 8192
    """Tokens after which queries first grow."""
    first: Annotated[int, Interval(0, 1), Example("0")] = 1
    """The number of the first position (Llama 4: 1, Ministral 3: 0)."""


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters beside frozen weights (Hu et al. 2022); rank 0 = every weight is trained.

    The product of a matrix W with an input x becomes W x + alpha / rank · B (A x). Only A (rank × inputs) and B
    (outputs × rank) are trained."""

    rank: Annotated[int, Interval(0), Example("8")] = 0
    """Rank of the adapters; 0 switches them off."""
    alpha: Annotated[float, Interval(above=0)] = 16.0
    """The adapters' outputs are multiplied by alpha / rank."""
    targets: Annotated[str, Example("attention")] = "all"
    """Matrices with adapters: attention, feed_forward, all (of both), or names such as wq,wv or mlp.up. Routers,
    embeddings and head have none."""

    @property
    def scale(self) -> float:
        """The factor of the adapters' outputs."""
        return self.alpha / self.rank

    @property
    def names(self) -> tuple[str, ...]:
        """The targets one by one."""
        return tuple(name.strip() for name in self.targets.split(","))


@hashed_once
@dataclass(frozen=True)
class ModelConfig(Hashed):
    """The shape of a model."""

    preset: Annotated[str, Example("llama3.1-8b")] = ""
    """Start from a known model (gpt2, llama3.1-8b, ... ; `phalanx models` lists them); other fields override it."""
    from_: Annotated[str, Printable(), Example("runs/smollm2")] = ""
    """Start from these weights with a new optimizer: a run's directory, one of its checkpoints, or a Hugging Face
    folder. Shape and data.tokenizer are theirs unless set. A run that resumes does not read them again."""
    ignore_config: tuple[str, ...] = ()
    """Fields of the config.json that model.from or model=hf: names which are read as if they were absent, though they
    are refused; rope_scaling.factor is one in an object."""
    n_layers: Annotated[int, Interval(1), Example("12")] = 4
    """Transformer blocks."""
    d_model: Annotated[int, Interval(1), Example("768")] = 128
    """Width of the residual stream."""
    n_heads: Annotated[int, Interval(1), Example("12")] = 4
    """Query heads."""
    n_kv_heads: Annotated[int, Interval(0), Example("4")] = 0
    """Key/value heads (grouped-query attention); 0 means n_heads."""
    head_dim: Annotated[int, Interval(0), Example("64")] = 0
    """Size of one head; 0 means d_model / n_heads."""
    d_ff: Annotated[int, Interval(0), Example("2048")] = 0
    """Hidden width of the MLP; 0 means 4 d_model, or with a gate 8/3 d_model rounded up to a multiple of 64."""
    vocab_size: Annotated[int, Interval(0), Example("32000")] = 0
    """Tokens in the vocabulary; 0 means the tokenizer's."""
    seq_len: Annotated[int, Interval(1), Example("2048")] = 256
    """Context length in tokens: the length of a training sample, and the number of learned positions."""
    window: Annotated[int, Interval(0), Example("1024")] = 0
    """Sliding-window attention: keys that a query sees at most, its own and those right before it (Mistral 7B, Jiang et
    al. 2023, section 2); 0 means all of them."""
    full_every: Annotated[int, Interval(0), Example("6")] = 0
    """With a window: every n-th layer attends to all keys, with n this number, counted from 1 (Gemma 2 and gpt-oss: 2,
    Gemma 3: 6); 0 means no layer."""
    window_pattern: Annotated[str, Example("full,window,window,window")] = ""
    """With a window, in place of full_every: which layers attend to all keys and which have it, a list of full and
    window that repeats over the layers (Ministral 8B); empty: as full_every says."""
    window_kind: Literal["sliding", "chunks"] = "sliding"
    """sliding: a query sees its own key and those right before it; chunks: those of its own chunk up to its own,
    chunks of `window` tokens counted from the start of a sequence or document (Llama 4)."""
    attention: Annotated[str, Example("latent")] = ""
    """Kind of attention: heads, wide_heads, latent, gated_heads, delta, one that is predicted but not trained (sparse,
    mamba, none), or one that a package adds (docs/reference/extending.md); a list such as latent,heads repeats over the
    layers (modules of mtp have the kind of the layer before them, unless it has n_layers kinds); empty: sparse with
    sparse.top_k, latent with mla.kv_rank, otherwise heads, with wide.head_dim wide_heads in layers without a window,
    and with shared_keys shared_heads and shared_wide_heads in the last layers."""
    feed_forward: Annotated[str, Example("experts")] = ""
    """Kind of feed-forward layer: dense, experts, none, or one that a package adds; a list repeats over the layers;
    empty: experts with moe.n_experts, otherwise dense."""
    mtp: Annotated[int, Interval(0), Example("1")] = 0
    """The last of the n_layers, as many as this, are modules that predict one more token each (DeepSeek-V3, section
    2.2): a matrix that joins normalised hidden states with the embeddings of later tokens, a block, a norm, the model's
    own head, and a loss with the factor train.mtp_weight. In a pipeline all of them belong to the last stage. Text is
    generated without them."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Kind of normalisation."""
    norm_place: Literal["before", "after", "both"] = "before"
    """Place of the norms of attention and MLP: before each of them, after each of them and before the residual sum
    (OLMo 2), or both (Gemma 2). The head's input is always normalised."""
    parallel_block: bool = False
    """Attention and MLP read the same residual stream, each through its own norm, and are added to it together
    (GPT-NeoX)."""
    positions: Literal["learned", "rope", "none"] = "learned"
    """Position encoding; none: the causal mask alone tells an order (Kazemnejad et al. 2023), or states do."""
    nope_every: Annotated[int, Interval(0), Example("4")] = 0
    """With rotary positions: every n-th layer has none, with n this number, counted from 1 (Yang et al. 2025, arXiv
    2501.18795; SmolLM3: 4); 0 means no layer."""
    activation: Literal["gelu", "gelu_tanh", "swiglu", "geglu", "swiglu_clamped", "relu2"] = "gelu"
    """The MLP: two matrices around GELU (exact or tanh form) or the square of ReLU (Nemotron; predicted and not
    trained), or three with a gate: SiLU (Llama), GELU in its tanh form (Gemma), or a clamped SiLU (gpt-oss: at most 7,
    with the other factor plus 1 and within ±7)."""
    bias: bool = True
    """Biases in linear layers and LayerNorm."""
    qkv_bias: bool = False
    """Biases in the query, key and value projections even where `bias` is off (Qwen 2)."""
    qk_norm: Literal["none", "head", "width", "unit"] = "none"
    """Normalisation of queries and keys: of each head (Qwen 3, Gemma 3), or of all heads together (OLMo 2), before
    they are rotated; unit: of each head without weights, after they are rotated, in layers where they are (Llama
    4)."""
    v_norm: bool = False
    """Values are normalised per head, without weights (Gemma 4)."""
    values_are_keys: bool = False
    """Values are the keys before their norm and rotation, without a matrix of their own; with wide.head_dim in layers
    with wide heads alone (Gemma 4)."""
    shared_keys: Annotated[int, Interval(0), Example("20")] = 0
    """The last layers, as many as this, have no keys and values of their own: they attend to those of the last layer
    before them that has a window as they do, or none (Gemma 4 E2B: 20, E4B: 18). In a pipeline one stage has them and
    the layers whose keys they read."""
    double_mlp: bool = False
    """The MLPs of these layers are twice as wide (Gemma 4 E2B)."""
    layer_embedding: Annotated[int, Interval(0), Example("256")] = 0
    """Width of an embedding of the tokens that each layer has of its own (Gemma 4 E2B and E4B): after its MLP the
    stream, projected to this width and activated, is multiplied by it, projected back, normalised and added. A
    projection of the model's embedding joins it before. In a pipeline each stage has the tables of its layers, and the
    projections of all layers are sent along; 0: none."""
    sinks: bool = False
    """Each head's softmax has one more, trained score, which belongs to no key (gpt-oss)."""
    attention_scale: Annotated[float, Interval(0)] = 0.0
    """Multiplies the scores before the softmax; 0 means 1 / √head_size (Gemma: 1 / √query_pre_attn_scalar)."""
    attention_softcap: Annotated[float, Interval(0)] = 0.0
    """Scores s become c tanh(s / c) with this c before the softmax (Gemma 2: 50); 0 leaves them."""
    logit_softcap: Annotated[float, Interval(0)] = 0.0
    """Logits x of the head become c tanh(x / c) with this c (Gemma 2: 30); 0 leaves them."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by √d_model (Gemma)."""
    embedding_multiplier: Annotated[float, Interval(above=0), Example("12")] = 1.0
    """Multiplies embeddings (Granite 3, Granite Team 2024)."""
    residual_multiplier: Annotated[float, Interval(above=0), Example("0.22")] = 1.0
    """Multiplies what attention and MLP add to the residual stream (Granite 3)."""
    layer_scale: bool = False
    """The output of each block is multiplied by a number, 1 at first, which training leaves as it is (Gemma 4)."""
    logit_divisor: Annotated[float, Interval(above=0), Example("16")] = 1.0
    """Divides the logits of the head, before their soft cap (Granite 3)."""
    tied: bool = True
    """The head shares the embedding's weights."""
    reward: bool = False
    """The head gives one number for a sequence, at its last token, instead of logits: a reward model, which corpus
    preferences trains (docs/guides/preference-tuning.md)."""
    dropout: Annotated[float, Interval(0), Interval(below=1)] = 0.0
    """Drop probability after the embedding, in attention and on each residual branch while training."""
    norm_eps: Annotated[float, Interval(above=0), Example("1e-6")] = 1e-5
    """Added to the variance in a normalisation."""
    rope_theta: Annotated[float, Interval(above=0), Example("500000")] = 10000.0
    """Base of the rotary frequencies."""
    window_rope_theta: Annotated[float, Interval(0), Example("10000")] = 0.0
    """Base in layers with a window, where rope_scaling then has no effect (Gemma 3: 10,000); 0 means rope_theta, with
    rope_scaling."""
    rotary_fraction: Annotated[float, Interval(0.01, 1)] = 1.0
    """Share of a head's elements that rotary positions turn, the first ones (GPT-NeoX: 0.25; GLM-4.5: 0.5)."""
    rotary_pairs: Annotated[float, Interval(0.01, 1), Example("0.25")] = 1.0
    """Share of these elements' pairs that turn, those with the highest frequencies (Barbero et al. 2024, arXiv
    2410.06205; Gemma 4: 0.25); with window_rope_theta in layers without a window alone."""
    init_std: Annotated[float, Interval(0)] = 0.02
    """Standard deviation of initial weights; residual outputs get init_std / sqrt(2 n_layers) (GPT-2, section 2.3)."""
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    query_growth: QueryGrowth = field(default_factory=QueryGrowth)
    moe: MoE = field(default_factory=MoE)
    mla: MLA = field(default_factory=MLA)
    sparse: SparseAttention = field(default_factory=SparseAttention)
    delta: DeltaNet = field(default_factory=DeltaNet)
    mamba: Mamba = field(default_factory=Mamba)
    wide: WideHeads = field(default_factory=WideHeads)
    lora: LoRA = field(default_factory=LoRA)

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    @property
    def freezes(self) -> bool:
        """Whether the model's own weights are frozen: beside adapters, and while the indexer of sparse attention warms
        up."""
        return self.lora.rank > 0 or self.warms_up

    @property
    def warms_up(self) -> bool:
        """Whether the indexer of sparse attention alone is trained."""
        return self.sparse.top_k > 0 and self.sparse.dense_warmup

    @property
    def head_size(self) -> int:
        """Size of a query/key head in elements."""
        if self.mla.kv_rank:
            return self.mla.nope_head_dim + self.mla.rope_head_dim
        return self.head_dim or self.d_model // self.n_heads

    @property
    def rotary_size(self) -> int:
        """Elements of a query/key head that rotary positions turn."""
        return self.mla.rope_head_dim if self.mla.kv_rank else int(self.head_size * self.rotary_fraction)

    @property
    def turned_pairs(self) -> int:
        """Pairs of these elements that turn in layers without a window."""
        return int(self.rotary_pairs * self.rotary_size // 2)

    @property
    def v_head_size(self) -> int:
        """Size of a value head in elements."""
        return self.mla.v_head_dim if self.mla.kv_rank else self.head_size

    @property
    def ff_size(self) -> int:
        """Hidden width of the dense MLP."""
        if self.d_ff:
            return self.d_ff
        if self.gated:
            return -(-8 * self.d_model // 3 // 64) * 64
        return 4 * self.d_model

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate: three matrices instead of two."""
        return self.activation in ("swiglu", "geglu", "swiglu_clamped")

    @property
    def norms_inputs(self) -> bool:
        """Whether the inputs of attention and MLP are normalised."""
        return self.norm_place != "after"

    @property
    def norms_outputs(self) -> bool:
        """Whether the outputs of attention and MLP are normalised before they are added to the residual stream."""
        return self.norm_place != "before"

    @property
    def main(self) -> ModelConfig:
        """The model without its modules for further tokens."""
        return replace(self, n_layers=self.n_layers - self.mtp, mtp=0) if self.mtp else self

    def kind_of(self, kinds: Sequence[str], layer: int) -> str:
        """Returns the kind of a layer from a list that repeats over the layers. Modules for further tokens have that of
        the last layer before them, unless the list states every layer."""
        if len(kinds) != self.n_layers:
            layer = min(layer, self.n_layers - self.mtp - 1)
        return kinds[layer % len(kinds)]

    @property
    def together(self) -> int:
        """The last layers that one stage of a pipeline has, at least one: all modules for further tokens, and layers
        without keys of their own with those whose keys they read."""
        return max(1, self.mtp, self.n_layers - min(self.key_layers, default=self.n_layers))

    @property
    def most_stages(self) -> int:
        """Stages of the longest pipeline, each of which has a layer."""
        return self.n_layers - self.together + 1

    @property
    def key_layers(self) -> tuple[int, ...]:
        """The layers whose keys layers without any of their own read."""
        return tuple(
            dict.fromkeys(self.keys_of(layer) for layer in range(self.n_layers - self.shared_keys, self.n_layers))
        )

    def keys_of(self, layer: int) -> int:
        """Returns the layer whose keys layer `layer` attends to; -1 if there is none that sees as many keys."""
        own = self.n_layers - self.shared_keys
        if layer < own:
            return layer
        alike = [each for each in range(own) if self.window_of(each) == self.window_of(layer)]
        return alike[-1] if alike else -1

    @property
    def stream_width(self) -> int:
        """Numbers per token that a stage of a pipeline sends to the next: hidden states, and with layer_embedding the
        projections of the embedding."""
        return self.d_model + self.n_layers * self.layer_embedding

    @property
    def embeds_at_end(self) -> bool:
        """Whether the last stage of a pipeline computes with the embedding as well: as its head, or in modules for
        further tokens."""
        return self.tied or self.mtp > 0

    def rotates(self, layer: int) -> bool:
        """Returns whether rotary positions turn queries and keys of layer `layer`."""
        return self.positions == "rope" and not (self.nope_every and (layer + 1) % self.nope_every == 0)

    def window_of(self, layer: int) -> int:
        """Returns the keys that a query of layer `layer` sees at most; 0: all."""
        if self.window_pattern:
            kinds = self.window_pattern.split(",")
            return 0 if kinds[layer % len(kinds)].strip() == "full" else self.window
        return 0 if self.full_every and (layer + 1) % self.full_every == 0 else self.window

    @property
    def heads_by_layer(self) -> tuple[str, ...]:
        """The kind of attention of each layer where windows decide which layers have wide heads, and their place which
        have keys of their own."""
        own = self.n_layers - self.shared_keys
        wide = (self.wide.head_dim > 0 and not self.window_of(layer) for layer in range(self.n_layers))
        return tuple("shared_" * (layer >= own) + "wide_" * each + "heads" for layer, each in enumerate(wide))

    def norms_heads(self, layer: int) -> bool:
        """Returns whether queries and keys of layer `layer` are normalised."""
        return self.qk_norm != "none" and (self.qk_norm != "unit" or self.rotates(layer))

    @property
    def expert_ff_size(self) -> int:
        return self.moe.d_ff or self.ff_size


def window_within(window: int, keys: int) -> int:
    """Returns the keys that a query sees at most: `window`, or 0 for all where the window spans all `keys`."""
    return window if window < keys else 0
