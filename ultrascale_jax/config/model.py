"""The shape of one decoder: everything that its checkpoint fixes."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Literal

from ultrascale_jax.config import pattern as patterns
from ultrascale_jax.config.section import (
    EVEN,
    POSITIVE,
    Count,
    Natural,
    NonNegative,
    Positive,
    Section,
    at_least,
    between,
)

FeedForward = Literal["mlp", "moe"]
"""One layer for all tokens, or experts."""

Rule = Literal["delta", "mamba2"]
"""How linear attention changes its state: Gated DeltaNet (arXiv 2412.06464), or Mamba-2 (arXiv 2405.21060)."""

Mixer = Literal["attention", "latent", "delta", "mamba2"]
"""Grouped-query attention, latent attention, or linear attention by its rule."""

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu", "relu2"]
"""Functions that join gate and up in a gated layer (`parallel/gate.py`), or take up alone."""

GATELESS = ("relu2",)
"""Activations of feed-forward layers without a gate."""

SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702
"""Numbers of `clamped_swiglu`: the largest gate and up, and the slope of the sigmoid, which makes it close to GELU."""

WORDS = 128
"""A device's part of a padded vocabulary is a multiple of it, as wide as a tile of a product is."""

MOST_PARTS = 10_000
"""More layers, or experts, than any model has; they are counted through, so a file may not ask for 10^12."""


def padded_vocab_size(vocab_size: int, parts: int) -> int:
    """Return the rows of embedding and head that `parts` devices split; if they divide the vocabulary, its own."""
    step = parts * WORDS if vocab_size % parts else 1
    return -(-vocab_size // step) * step


@dataclass(frozen=True, kw_only=True)
class RopeScaling(Section, name="model.rope_scaling"):
    """Stretch of the rotary frequencies for a context longer than that of the pre-training.

    `linear` divides all frequencies by `factor` (arXiv 2306.15595). `llama3` (arXiv 2407.21783) and `yarn` (arXiv
    2309.00071) keep frequencies that turn often in `original_seq_len`, divide frequencies that hardly turn, and blend
    between them: llama3 along the turns, yarn the dims. A larger base (NTK-aware scaling) is `model.rope_theta`.
    """

    kind: Literal["linear", "yarn", "llama3"] = "llama3"
    """Rule that stretches the frequencies."""
    factor: Annotated[float, at_least(1)] = 8.0
    """How many times longer than `original_seq_len` the context is."""
    low_freq_factor: float = 1.0
    """Frequencies with fewer turns in `original_seq_len` are divided by `factor` (YaRN's beta_slow)."""
    high_freq_factor: float = 0.0
    """Frequencies with more turns are kept (YaRN's beta_fast); 0 is the kind's own: 4 for llama3, 32 for yarn."""
    original_seq_len: Count = 8192
    """Sequence length of the pre-training before the stretch, in tokens."""
    attention_factor: NonNegative = 0.0
    """Factor of cosines and sines in yarn; 0 is its own, 0.1 ln(factor) + 1."""
    mscale_all_dim: float = 0.0
    """Coefficient of yarn in latent attention: multiplies the scores by (0.1 mscale_all_dim ln(factor) + 1)^2
    (DeepSeek)."""
    truncate: bool = True
    """Whether yarn rounds the dims between which it blends outwards to integers; gpt-oss does not."""
    query_beta: NonNegative = 0.0
    """Queries at position p are times 1 + query_beta ln(1 + floor(p / original_seq_len)) (Ministral 3)."""

    def __post_init__(self):
        super().__post_init__()
        low, high = self.thresholds
        yarn, without = self.kind == "yarn", f"{self.kind} has none; use 0"
        inside = f"must lie between 0 and high_freq_factor, {high:g}"
        self.require(0 < low < high or (yarn and low == high), "low_freq_factor", inside)
        self.require(yarn or not self.attention_factor, "attention_factor", without)
        self.require(yarn or not self.mscale_all_dim, "mscale_all_dim", without)
        self.require(yarn or self.truncate, "truncate", f"{self.kind} rounds no dims; use True")

    @property
    def thresholds(self) -> tuple[float, float]:
        """Turns in `original_seq_len` below which a frequency is divided, and above which it is kept."""
        default = 32.0 if self.kind == "yarn" else 4.0
        return self.low_freq_factor, self.high_freq_factor or default

    @property
    def magnitude(self) -> float:
        """Factor of cosines and sines."""
        default = 0.1 * math.log(self.factor) + 1 if self.kind == "yarn" else 1.0
        return self.attention_factor or default

    @property
    def score_factor(self) -> float:
        """Factor of latent attention's scores."""
        return (0.1 * self.mscale_all_dim * math.log(self.factor) + 1) ** 2


@dataclass(frozen=True, kw_only=True)
class Experts(Section, name="model.experts"):
    """Feed-forward layers of experts: a router sends each token to `top_k` of them and weighs what they return.

    Mixtral (arXiv 2401.04088) and Qwen3-MoE are softmax scores, normalised; DeepSeek-V3 (arXiv 2412.19437) has sigmoid
    scores, a shared expert, first layers without experts, groups, and a bias instead of a loss that balances.
    """

    num: Annotated[int, between(1, MOST_PARTS)] = 8
    """Routed experts of a layer (E)."""
    top_k: Count = 2
    """Routed experts that a token visits (k)."""
    d_ff: Natural = 0
    """Width of one expert (F); 0 is `model.d_ff`, the width of layers without experts."""
    shared: Annotated[int, between(0, MOST_PARTS)] = 0
    """Experts that every token visits; together one gated layer of `shared` times the width."""
    shared_gate: bool = False
    """A sigmoid of a projection of the token weighs what the shared experts return (Qwen2-MoE)."""
    dense_layers: Natural = 0
    """First layers that have one gated layer of `model.d_ff` instead of experts."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """Function of the router's logits, in float32."""
    normalize: bool = True
    """Divide the weights of a token's experts by their sum."""
    scale: Positive = 1.0
    """Multiplies the weights of the routed experts (DeepSeek's `routed_scaling_factor`)."""
    groups: Count = 1
    """Groups of neighbouring experts (DeepSeek's `n_group`): one group's experts are on as few nodes as possible."""
    groups_per_token: Count = 1
    """Groups that a token may visit: those with the highest sum of their two best scores."""
    bias: bool = False
    """Experts are chosen by score plus a bias that is no part of their weight; `moe.bias_rate` says how it moves."""
    biases: bool = False
    """The router and each product of an expert add a bias, which is trained like a weight (gpt-oss)."""

    def __post_init__(self):
        super().__post_init__()
        groups, chosen = self.groups, self.groups_per_token
        reach = self.num // groups * chosen
        self.require(self.num % groups == 0, "groups", f"must divide num={self.num}")
        self.require(chosen <= groups, "groups_per_token", f"there are only groups={groups}")
        gated = self.shared > 0 or not self.shared_gate
        self.require(gated, "shared_gate", "shared=0, no expert to weigh; use False")
        self.require(self.top_k <= reach, "top_k", f"a token reaches {reach} experts; use fewer")


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Section, name="model.latent"):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): queries, keys and values are made of short latents.

    A head's H dims are `head_dim - rope_dim` without and then `rope_dim` with rotary positions; the latter are one
    rotary key that all heads share. Rotary pairs are neighbours in the weights, not halves as in other attention.
    """

    q_rank: Natural = 1536
    """Width of the queries' latent (Q); 0 makes queries of the residual stream itself."""
    kv_rank: Count = 512
    """Width of the latent of keys and values (J)."""
    rope_dim: Annotated[int, at_least(1), EVEN] = 64
    """Dims of a head that have rotary positions."""
    v_dim: Count = 128
    """Width of a head's values (W)."""


@dataclass(frozen=True, kw_only=True)
class LinearAttention(Section, name="model.linear"):
    """Linear attention in place of attention: a head remembers the past in a state of a fixed size.

    `model.full_attention_every` says which layers keep full attention (every fourth in Qwen3-Next).
    """

    rule: Rule = "delta"
    """A token corrects what the state has for its key (Gated DeltaNet, as in Qwen3-Next), or adds to it (Mamba-2)."""
    key_heads: Count = 16
    """Heads of queries and keys (K), groups in Mamba-2; each serves `value_heads / key_heads` heads of values."""
    value_heads: Count = 32
    """Heads of values (N), each with a state of `key_dim * value_dim` numbers."""
    key_dim: Count = 128
    """Width of a head's queries and keys (H); Mamba-2's `d_state`."""
    value_dim: Count = 128
    """Width of a head's values (W)."""
    conv_kernel: Annotated[int, at_least(2)] = 4
    """Taps (O) of the causal convolution of each channel of queries, keys and values."""
    step_min: NonNegative = 0.0
    """Least time step of Mamba-2 (Nemotron-H's `time_step_min`)."""
    norm: bool = True
    """RMSNorm of the result before the output projection; some models with Mamba-2 only gate it (Falcon-H1)."""
    beside_attention: bool = False
    """Each layer has attention too: both read the same input, and their results are added (Falcon-H1)."""

    def __post_init__(self):
        super().__post_init__()
        fix = f"must be a multiple of key_heads={self.key_heads}"
        self.require(self.value_heads % self.key_heads == 0, "value_heads", fix)
        self.require(self.norm or self.rule == "mamba2", "norm", f"{self.rule} has one; use True")
        fix = f"{self.rule} has no time steps; use 0"
        self.require(not self.step_min or self.rule == "mamba2", "step_min", fix)


@dataclass(frozen=True, kw_only=True)
class Multipliers(Section, name="model.multipliers"):
    """Constants that multiply matrices of each layer before they are used, and so their results (Falcon-H1).

    Maximal-update parametrization (arXiv 2203.03466): training changes the matrices as they are without them.
    """

    attn_o: Positive = 1.0
    """Multiplies the output projection of attention."""
    mlp_gate: Positive = 1.0
    """Multiplies the gate of the feed-forward layer."""
    mlp_down: Positive = 1.0
    """Multiplies the output projection of the feed-forward layer."""
    linear_q: Positive = 1.0
    """Multiplies the queries of linear attention, Mamba-2's C."""
    linear_k: Positive = 1.0
    """Multiplies the keys of linear attention, Mamba-2's B."""
    linear_v: Positive = 1.0
    """Multiplies the values of linear attention, Mamba-2's x."""
    linear_z: Positive = 1.0
    """Multiplies the gate of linear attention."""
    linear_a: Positive = 1.0
    """Multiplies the decays of linear attention, Mamba-2's time steps."""
    linear_o: Positive = 1.0
    """Multiplies the output projection of linear attention."""


Share = Annotated[float, POSITIVE, between(0, 1)]


@dataclass(frozen=True, kw_only=True)
class FullAttention(Section, name="model.full_attention"):
    """Attention of the layers without a window, where it has another shape than that of the others (Gemma 4).

    Each field takes the place of the model's own of that name. `model.full_attention_every` layers are one row of a
    stack.
    """

    num_kv_heads: Count = 4
    """Number of key/value heads."""
    head_dim: Annotated[int, at_least(1), EVEN] = 64
    """Width of one head."""
    rope_share: Share = 1.0
    """Share of the pairs of a head's dims that turn with the position."""
    values_are_keys: bool = False
    """Values are the keys, as they are before norm and rotation."""


EXCLUDED = {
    "pattern": {
        "full_attention_every sliding_window first_window_layer latent mtp_layers layer_scale": (
            "has no place in a model with model.pattern; leave it out"
        ),
        "experts.dense_layers": "model.pattern says which layers have experts; use 0",
        "linear.beside_attention": "model.pattern has either in a layer; use False",
    },
    "experts": {"norm_placement": "a model with experts has its norms before; use pre"},
    "latent": {
        "qk_norm": "latent attention normalises its latents; use none",
        "query_scale": "latent attention scales by head_dim; use 0",
        "rope_dim": "latent attention takes model.latent.rope_dim; use 0",
        "qkv_bias o_bias attention_sinks output_gate value_norm values_are_keys": (
            "latent attention has none; use False"
        ),
    },
    "linear": {"latent sliding_window": "a model with model.linear has none; use none"},
    "linear.beside_attention": {
        "full_attention_every": "model.linear.beside_attention makes all layers equal; use 0",
        "o_bias": "attention beside model.linear has none; use False",
    },
    "full_attention": {
        "rope_dim nope_every mtp_layers rope_scaling.query_beta": (
            "is not for models with model.full_attention; use 0"
        ),
    },
}
"""By part of a model: the fields that a model with it leaves at their defaults, and how to mend another value."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section, name="model"):
    """Shape of one decoder; it covers the families of `huggingface/checkpoint.py`."""

    vocab_size: Count = 256
    """Number of token ids (V)."""
    d_model: Count = 256
    """Width of the residual stream (D)."""
    d_ff: Count = 1024
    """Width of the feed-forward layer (F)."""
    activation: Activation = "silu"
    """Function of gate and up in feed-forward layers and experts: silu(gate) * up (Llama), the same with GELU in
    its tanh form (Gemma), or gate * sigmoid(1.702 gate) * (up + 1), both clamped to 7 (gpt-oss); without a gate
    relu(up)^2 (Nemotron-H, arXiv 2109.08668)."""
    num_layers: Annotated[int, between(1, MOST_PARTS)] = 4
    """Number of blocks (L)."""
    pattern: str = ""
    """Halves of the layers in order, for layers that have one alone or alternate in no fixed period (Nemotron-H): `M`
    is `linear`, `*` attention, `-` an MLP, `E` experts (`config/pattern.py`)."""
    num_heads: Count = 4
    """Number of query heads (N)."""
    num_kv_heads: Count = 4
    """Number of key/value heads (K); fewer than `num_heads` is grouped-query attention."""
    head_dim: Annotated[int, at_least(1), EVEN] = 64
    """Width of one head (H)."""
    norm_eps: NonNegative = 1e-5
    """Added to the mean square in RMSNorm."""
    norm_placement: Literal["pre", "post", "both"] = "pre"
    """Normalise the input of each half-block (Llama), its output (OLMo-2), or each with a norm of its own (Gemma)."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """RMSNorm of queries and keys: none, per head (Qwen3) or over the full width (OLMo-2)."""
    value_norm: bool = False
    """RMSNorm of values per head, without a scale (Gemma 4)."""
    values_are_keys: bool = False
    """Values are the keys, as they are before norm and rotation; the layers have no projection of values."""
    qkv_bias: bool = False
    """Add a bias to the query, key and value projections (Qwen2)."""
    o_bias: bool = False
    """Add a bias to the output projection of attention (gpt-oss)."""
    attention_sinks: bool = False
    """Each head has a logit more in its softmax, which is trained and has no value (gpt-oss)."""
    output_gate: bool = False
    """A sigmoid of a projection of the token multiplies what attention returns, before the output projection
    (Qwen3-Next)."""
    query_scale: NonNegative = 0.0
    """Scores are divided by the root of this (Gemma's `query_pre_attn_scalar`); 0 is `head_dim`."""
    tied_embeddings: bool = False
    """Use the embedding table as the output head."""
    embed_scale: NonNegative = 1.0
    """Multiplies the embeddings; 0 is the root of `d_model` (Gemma)."""
    residual_scale: Positive = 1.0
    """Multiplies the result of each half of a layer before it is added to the residual stream (Granite)."""
    logit_divisor: Positive = 1.0
    """Divides the logits (Granite's `logits_scaling`)."""
    logit_cap: NonNegative = 0.0
    """Logits l become logit_cap tanh(l / logit_cap) (Gemma 4); 0: they stay."""
    layer_scale: bool = False
    """Each layer multiplies what it returns by a number of its own, which is not trained (Gemma 4)."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_theta_local: float = 0.0
    """Base in the layers with a window, which are not stretched (Gemma); 0: no other than in layers without one."""
    rope_scaling: RopeScaling | None = None
    """Stretch of the rotary frequencies, or none."""
    rope_dim: Annotated[int, at_least(0), EVEN] = 0
    """First dims of a head that have rotary positions (GLM-4.5: half of them); 0: all."""
    rope_share: Share = 1.0
    """Share of the pairs of these dims that turn, those with the highest frequencies (Gemma 4: a quarter)."""
    nope_every: Natural = 0
    """Every n-th layer has no rotary positions (NoPE; 4 in SmolLM3); 0: all have them."""
    sliding_window: Count | None = None
    """A position attends to itself and the `sliding_window - 1` before it (Mistral), or to all."""
    first_window_layer: Natural = 0
    """Layers before this one ignore `sliding_window` (Qwen2's `max_window_layers`)."""
    full_attention_every: Natural = 0
    """Every n-th layer ignores `sliding_window` (6 in Gemma 3) or `linear` (4 in Qwen3-Next); 0: none does."""
    full_attention_offset: Natural = 0
    """Layers of `linear` after the full one in each such group (4 of 10 in Granite 4); 0: it is the last."""
    experts: Experts | None = None
    """Experts in the feed-forward layers, or none."""
    latent: LatentAttention | None = None
    """Multi-head latent attention, or none: grouped-query attention."""
    linear: LinearAttention | None = None
    """Linear attention, or none."""
    full_attention: FullAttention | None = None
    """Another shape of the attention in layers that ignore `sliding_window`, or none."""
    multipliers: Multipliers | None = None
    """Constants that multiply matrices of the layers, or none."""
    mtp_layers: Annotated[int, between(0, MOST_PARTS)] = 0
    """Modules that each predict one token further than the one before (multi-token prediction, DeepSeek-V3): a layer
    like the last one, after the model. Training alone runs them; `train.mtp_weight` is the weight of their losses."""

    def __post_init__(self):
        super().__post_init__()
        if self.num_heads % self.num_kv_heads:
            self.refuse("num_kv_heads", f"must divide model.num_heads={self.num_heads}")
        fix = f"must be at most model.head_dim={self.head_dim}"
        self.require(self.rope_dim <= self.head_dim, "rope_dim", fix)
        yarn = self.rope_scaling is not None and self.rope_scaling.kind == "yarn"
        sound = self.rope_theta > 1 or (self.rope_theta == 1 and not yarn)
        self.require(sound, "rope_theta", f"must be {'more than' if yarn else 'at least'} 1")
        self._check_windows()
        if self.pattern:
            self._check_pattern()
        if self.rope_scaling is not None and self.rope_scaling.query_beta:
            plain = self.latent is None and not (self.nope_every or self.rope_dim)
            fix = "wants rotary positions in whole heads of all layers, without latents; use 0"
            self.require(plain, "rope_scaling.query_beta", fix)
        if self.experts is not None:
            if self.dense_layers >= self.num_layers:
                fix = f"must be less than model.num_layers={self.num_layers}"
                self.refuse("experts.dense_layers", fix)
        if self.latent is not None:
            self._check_latent(self.latent)
        if self.linear is not None:
            if not self.pattern:
                self._check_group("linear")
            fix = "must be 0 or 1 in models with model.linear"
            self.require(self.nope_every < 2, "nope_every", fix)
        if self.multipliers is not None:
            self._check_multipliers(self.multipliers)
        if self.full_attention is not None:
            self._check_full_attention(self.full_attention)
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for part in filter(self._value, EXCLUDED):
            for names, fix in EXCLUDED[part].items():
                for name in names.split():
                    is_default = self._value(name) in (defaults.get(name), None, 0)
                    self.require(is_default, name, fix)

    def _value(self, path: str) -> object:
        """Return the value of a field, or of a part's field; None without that part."""
        value: object = self
        for name in path.split("."):
            value = getattr(value, name, None)
        return value

    def _check_pattern(self) -> None:
        """Check that the pattern is of this model's parts, and that they are all that tells its layers apart."""
        text, most = self.pattern, patterns.MOST_HALVES
        is_pattern = set(text) <= {*patterns.MIXERS, *patterns.FEED_FORWARDS} and len(text) <= most
        self.require(is_pattern, "pattern", f"has M, *, - and E, at most {most} in all")
        for letter, part, has_part in (
            ("M", "linear", self.linear is not None),
            ("E", "experts", self.experts is not None),
        ):
            fix = f"has {letter} where there is model.{part}, and nowhere else"
            self.require((letter in text) == has_part, "pattern", fix)
        fix = "has experts in all feed-forward layers or in none; use - or E"
        self.require(not {"-", "E"} <= set(text), "pattern", fix)
        layers = len(patterns.layers_of(text))
        fix = f"model.pattern has {layers} layers: a mixer and the feed-forward layer behind it, or either alone"
        self.require(self.num_layers == layers, "num_layers", fix)
        self.require(self.nope_every < 2, "nope_every", "must be 0 or 1 with model.pattern")

    def _check_windows(self) -> None:
        """Check which layers have a window."""
        every, local = self.full_attention_every, self.rope_theta_local
        if every and self.sliding_window is None and self.linear is None:
            fix = "needs model.sliding_window or model.linear; set one, or use 0"
            self.refuse("full_attention_every", fix)
        if every and self.first_window_layer:
            self.refuse("first_window_layer", "model.full_attention_every is there; use 0")
        fix = "is of groups of model.linear, and less than model.full_attention_every; use 0"
        sound = self.full_attention_offset < (every if self.linear is not None and every else 1)
        self.require(sound, "full_attention_offset", fix)
        if local and (local < 1 or not every):
            fix = "must be at least 1 with model.full_attention_every, and 0 without"
            self.refuse("rope_theta_local", fix)

    def _check_latent(self, latent: LatentAttention) -> None:
        rope, heads = latent.rope_dim, self.num_heads
        if self.head_dim <= rope:
            self.refuse("head_dim", f"must be more than model.latent.rope_dim={rope}, its part")
        if latent.v_dim > self.head_dim:
            self.refuse("latent.v_dim", f"must be at most model.head_dim={self.head_dim}")
        if self.num_kv_heads != heads:
            self.refuse("num_kv_heads", f"latent attention has as many as model.num_heads={heads}")

    def _check_group(self, section: str) -> None:
        """Refuse models whose layers are no repeated group, as `section` makes them."""
        group = f"must be a multiple of model.full_attention_every={self.layer_group}"
        self.require(self.num_layers % self.layer_group == 0, "num_layers", group)
        if self.dense_layers not in (0, self.num_layers):
            self.refuse("experts.dense_layers", f"layers of model.{section} are equal; use 0")

    def _check_full_attention(self, full: FullAttention) -> None:
        self._check_group("full_attention")
        fix = "needs model.full_attention_every layers with a model.sliding_window, and no latents"
        patterned = self.full_attention_every > 0 and self.sliding_window is not None
        sound = patterned and self.linear is None and self.latent is None
        self.require(sound, "full_attention", fix)
        divides = self.num_heads % full.num_kv_heads == 0
        fix = f"must divide model.num_heads={self.num_heads}"
        full.require(divides, "num_kv_heads", fix)

    def _check_multipliers(self, multipliers: Multipliers) -> None:
        """Refuse multipliers of matrices that no layer has."""
        present = {
            "attn": any("attention" in self.mixers(i) for i in range(self.num_layers)),
            "mlp": self.experts is None,
            "linear": self.linear is not None,
        }
        for field in dataclasses.fields(multipliers):
            is_one = getattr(multipliers, field.name) == 1
            fix = "no layer has this matrix, or some have experts; use 1"
            multipliers.require(present[field.name.split("_")[0]] or is_one, field.name, fix)
        fix = f"model.activation={self.activation} has no gate; use 1"
        multipliers.require(self.is_gated or multipliers.mlp_gate == 1, "mlp_gate", fix)

    def feed_forward(self, layer: int) -> FeedForward | None:
        """Return which feed-forward layer a layer has; a `pattern` has layers without."""
        if self.pattern and self.kinds_of_layers[layer][-1] not in patterns.FEED_FORWARDS:
            return None
        return "mlp" if layer < self.dense_layers else "moe"

    def mixers(self, layer: int) -> tuple[Mixer, ...]:
        """Return which attention a layer has: one, or two side by side; a `pattern` has layers without."""
        full: Mixer = "attention" if self.latent is None else "latent"
        if self.pattern:
            letter = self.kinds_of_layers[layer][0]
            if letter == "M" and self.linear is not None:
                return (self.linear.rule,)
            return (full,) if letter == "*" else ()
        if self.linear is None or self.is_full(layer):
            return (full,)
        return (full, self.linear.rule) if self.linear.beside_attention else (self.linear.rule,)

    @property
    def is_gated(self) -> bool:
        """Whether feed-forward layers and experts have a gate."""
        return self.activation not in GATELESS

    def multiplier(self, name: str) -> float:
        """Return a constant of `multipliers`, or 1 without them."""
        return 1.0 if self.multipliers is None else getattr(self.multipliers, name)

    @property
    def kinds_of_layers(self) -> tuple[str, ...]:
        """The letters of each layer of the `pattern`."""
        return patterns.layers_of(self.pattern)

    @property
    def layer_group(self) -> int:
        """Consecutive layers that are one row of a stack: more than one where layers of two kinds alternate.

        A `pattern` may have stacks with rows of other lengths; this is the longest one.
        """
        if self.pattern:
            return max(layers.step for layers in self.stacks)
        alternate = self.linear is not None or self.full_attention is not None
        return self.full_attention_every or 1 if alternate else 1

    @property
    def full_shape(self) -> "ModelConfig":
        """The model as if all its layers had the attention of the full ones, with the fields of `full_attention`."""
        if self.full_attention is None:
            return self
        full = self.full_attention
        changes = {field.name: getattr(full, field.name) for field in dataclasses.fields(full)}
        return dataclasses.replace(self, **changes)

    def of_layer(self, layer: int) -> "ModelConfig":
        """Return the model as if all its layers had the attention of this one."""
        return self.full_shape if self.is_full(layer) else self

    @property
    def rotary_dim(self) -> int:
        """Dims of a head that have rotary positions."""
        return self.rope_dim or self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def value_dim(self) -> int:
        """Width of a head's values."""
        return self.head_dim if self.latent is None else self.latent.v_dim

    @property
    def expert_d_ff(self) -> int:
        """Width of one expert; 0 without experts."""
        return 0 if self.experts is None else self.experts.d_ff or self.d_ff

    @property
    def dense_layers(self) -> int:
        """Layers without experts, the first ones."""
        return self.num_layers if self.experts is None else self.experts.dense_layers

    @property
    def stacks(self) -> tuple[range, ...]:
        """Runs of layers with equal parameters, in order. Layers without experts are one, those with are the next.

        Where layers of two kinds alternate, a row is a group of them; a run has the first layer of each, and the
        group's length as its step.
        """
        if self.pattern:
            return patterns.runs(self.pattern)
        dense, group = self.dense_layers, self.layer_group
        runs = range(0, dense, group), range(dense, self.num_layers, group)
        return tuple(layers for layers in runs if layers)

    @property
    def row_starts(self) -> list[int]:
        """The first layer of each row of the stacks."""
        return [layer for layers in self.stacks for layer in layers]

    def is_full(self, layer: int) -> bool:
        """Return whether a layer ignores window or linear attention because of `full_attention_every`."""
        every, place = self.full_attention_every, layer + 1 + self.full_attention_offset
        return every > 0 and place % every == 0

    def is_rotary(self, layer: int) -> bool:
        """Return whether a layer has rotary positions."""
        return self.nope_every == 0 or (layer + 1) % self.nope_every > 0

    def loop_window(self, layer: int) -> int | None:
        """Return the window of the loop that runs a layer, in which some may be full (`LayerInputs.full`)."""
        return self.sliding_window if layer >= self.first_window_layer else None

    def window(self, layer: int) -> int | None:
        """Return the attention window of a layer."""
        return None if self.is_full(layer) else self.loop_window(layer)

    @property
    def window_share(self) -> float:
        """Share of the layers that have a window."""
        if self.sliding_window is None:
            return 0.0
        full = self.num_layers // self.full_attention_every if self.full_attention_every else 0
        return (
            max(self.num_layers - self.first_window_layer, 0) / self.num_layers
            - full / self.num_layers
        )

    @property
    def widest_window(self) -> int | None:
        """The window of the layers that see most: none if a layer has none."""
        return self.sliding_window if self.window_share == 1 else None

    @property
    def score_scale(self) -> float:
        """Factor of the queries after 1/sqrt(head_dim), so that scores are divided by the root of `query_scale`."""
        return math.sqrt(self.head_dim / self.query_scale) if self.query_scale else 1.0
