"""What distinguishes one decoder of the Llama family from another, and where such a description comes from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Stretching of the rotary frequencies: `linear` (position interpolation), `llama3`, or by `divisors`, one each."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 8192
    divisors: tuple[float, ...] = ()  # one a frequency: of a GGUF file, which stores them

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3", "divisors"):
            raise ValueError(f"rope scaling {self.kind!r} is not supported: specjax knows linear and llama3")
        _check_positive(self, "factor", "low_freq_factor", "high_freq_factor", "original_context_length")
        if not all(map(_is_positive, self.divisors)) or bool(self.divisors) != (self.kind == "divisors"):
            raise ValueError(f"divisors of a rope scaling {self.kind!r} make no sense: {self.divisors!r:.60}")


def _check_positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not _is_positive(value):
            raise ValueError(f"{name}={value!r}: must be a number above zero")


def _is_positive(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 < value < math.inf


_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
    "context_length",
)  # fmt: skip
MOST_LAYERS = 1024
"""Several times the deepest model there is: a description that says more would be worked on for ever."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama family: Llama 2/3, SmolLM2, Mistral, Qwen2/2.5, Qwen3.

    Sizes are in elements, lengths in tokens. `vocab_size` counts real ids; `padded_vocab_size` counts
    rows of the embedding, which some checkpoints pad.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    padded_vocab_size: int = 0  # 0: as vocab_size
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    attention_bias: bool = False  # on q, k and v: Qwen2
    qk_norm: bool = False  # RMSNorm over each head of q and k: Qwen3
    tied_embeddings: bool = False
    sliding_window: int | None = None  # tokens a query sees, itself included: Mistral 7B v0.1
    cache_lanes: int = 1  # the width of a cached head is padded to a multiple of these: see `specjax.cache.LANES`
    quantized: bool = False  # e4m3 weights of the linear layers, one scale an output channel

    def __post_init__(self) -> None:
        optional = {"padded_vocab_size": 0, "sliding_window": None, "cache_lanes": 1}
        for name in (*_SIZES, *(name for name, absent in optional.items() if getattr(self, name) != absent)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
                raise ValueError(f"{name}={value!r:.40}: the size of a model must be a positive integer below 2^31")
        if self.num_layers > MOST_LAYERS:
            raise ValueError(f"num_layers={self.num_layers}: specjax takes {MOST_LAYERS} layers at most")
        for name in ("attention_bias", "qk_norm", "tied_embeddings", "quantized"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name}={value!r:.40}: must be true or false")
        divisors = self.rope_scaling.divisors if self.rope_scaling else ()
        if divisors and len(divisors) != self.head_dim // 2:
            raise ValueError(f"{len(divisors)} rotary divisors: heads of {self.head_dim} have {self.head_dim // 2}")
        _check_positive(self, "rope_theta", "norm_eps")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: rotary embedding turns pairs, so it must be even")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads are not a multiple of {self.num_kv_heads} key/value heads")
        if self.padded_vocab_size == 0:
            object.__setattr__(self, "padded_vocab_size", self.vocab_size)
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(
                f"embedding of {self.padded_vocab_size} rows is smaller than the vocabulary {self.vocab_size}"
            )


FAMILIES = {"llama": {}, "mistral": {}, "qwen2": {"attention_bias": True}, "qwen3": {"qk_norm": True}}
"""`model_type` of a Hugging Face config (and `general.architecture` of a GGUF) with what it implies."""


def _family(name: str) -> dict[str, Any]:
    if name not in FAMILIES:
        raise ValueError(f"architecture {name!r} is not supported: specjax reads {', '.join(FAMILIES)}")
    return dict(FAMILIES[name])


def from_huggingface(config: Mapping[str, Any]) -> ModelConfig:
    """Read the contents of a Hugging Face `config.json` (either spelling of the rotary settings).

    Raises:
      ValueError: an architecture, activation or rotary scaling that the decoder does not have.
      KeyError: a size that is missing.
    """
    family = _family(config["model_type"])
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"activation {config['hidden_act']!r} is not supported: the decoder is SwiGLU (silu)")
    for name, neutral in _NEUTRAL.items():
        if (value := config.get(name, neutral)) not in (neutral, None):
            raise ValueError(f"{name}={value!r:.40} is not supported: the decoder computes as with {neutral!r}")
    if config.get("attention_bias") and not family.get("attention_bias"):
        raise ValueError("attention_bias=true with a biased output projection is not supported")
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or rope
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "divisors":
        raise ValueError("rope scaling 'divisors' is not supported: specjax knows linear and llama3")
    if (part := rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1))) != 1:
        raise ValueError(f"partial_rotary_factor {part} is not supported: the decoder turns whole heads")
    heads = config["num_attention_heads"]
    return ModelConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        context_length=config["max_position_embeddings"],
        rope_theta=rope.get("rope_theta") or config.get("rope_theta", 10_000.0),
        rope_scaling=None
        if kind == "default"
        else RopeScaling(
            kind,
            scaling["factor"],
            scaling.get("low_freq_factor", 1.0),
            scaling.get("high_freq_factor", 4.0),
            scaling.get("original_max_position_embeddings", config["max_position_embeddings"]),
        ),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        tied_embeddings=config.get("tie_word_embeddings", False),
        sliding_window=_sliding_window(config),
        **family,
    )


_NEUTRAL: dict[str, Any] = {
    "mlp_bias": False, "final_logit_softcapping": None, "attn_logit_softcapping": None, "query_pre_attn_scalar": None,
    "attention_multiplier": None, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0,
    "logit_scale": None, "clip_qkv": None, "use_qk_norm": False, "no_rope_layers": None, "attention_chunk_size": None,
    "num_experts": None, "num_local_experts": None,
}  # fmt: skip
"""Entries of other models' descriptions that change what is computed, with the value that does not."""


def _sliding_window(config: Mapping[str, Any]) -> int | None:
    """The one window of all layers, as `transformers` has it: Mistral has 4096 unless it says null, Qwen only if told.

    `layer_types` says which layers have it; without that, Qwen's are those from `max_window_layers` on.
    """
    family, layers = config["model_type"], config["num_hidden_layers"]
    qwen = family in ("qwen2", "qwen3")
    window = config.get("sliding_window", 4096) or None
    if family == "llama" or (qwen and not config.get("use_sliding_window")):
        window = None
    named = config.get("layer_types")
    if named is None:
        full = min(config.get("max_window_layers", 28), layers) if qwen and window else 0 if window else layers
        kinds = {kind for kind, count in (("full_attention", full), ("sliding_attention", layers - full)) if count > 0}
    elif isinstance(named, list) and len(named) == layers:
        kinds = set(map(str, named))
    else:
        raise ValueError(f"layer_types {named!r:.60}: must name the kind of each of the {layers} layers")
    if kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"} or window is None:
        found = ", ".join(sorted(kinds))
        raise ValueError(
            f"layers of kind {found} with sliding_window={window} (layer_types, max_window_layers) are not supported: "
            "all must be full_attention, or sliding_attention with one window"
        )
    return window


def from_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]], divisors: Sequence[float] = ()
) -> ModelConfig:
    """Read GGUF metadata. As in llama.cpp, `attention.sliding_window` means nothing to these architectures.

    Args:
      metadata: under llama.cpp's keys.
      tensors: each tensor's name with its shape, rows first.
      divisors: of the rotary frequencies, `rope_freqs.weight`, where the file has that tensor (Llama 3.1 and later).

    Raises:
      ValueError: an architecture or rotary scaling that the decoder does not have.
      KeyError: a setting that is missing.
    """
    architecture = metadata["general.architecture"]
    family = _family(architecture)

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{key}", default)
        if value is None:
            raise KeyError(f"{architecture}.{key}")
        return value

    heads, hidden, context = get("attention.head_count"), get("embedding_length"), get("context_length")
    scaling = None
    if metadata.get(f"{architecture}.rope.scaling.type", "none") != "none":
        scaling = RopeScaling(get("rope.scaling.type"), get("rope.scaling.factor"))
    if divisors:
        factor = scaling.factor if scaling else 1.0
        scaling = RopeScaling("divisors", factor, divisors=tuple(divisors))
    rows = tensors["token_embd.weight"][0]
    return ModelConfig(
        vocab_size=gguf_vocab_size(metadata) or rows,
        padded_vocab_size=rows,
        hidden_size=hidden,
        intermediate_size=get("feed_forward_length"),
        num_layers=get("block_count"),
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv", heads),
        head_dim=get("attention.key_length", hidden // heads),
        context_length=context,
        rope_theta=float(get("rope.freq_base", 10_000.0)),
        rope_scaling=scaling,
        norm_eps=float(f"{get('attention.layer_norm_rms_epsilon'):.7g}"),  # stored in float32
        tied_embeddings="output.weight" not in tensors,
        **family,
    )


def gguf_vocab_size(metadata: Mapping[str, Any]) -> int:
    """Ids that a token can have: llama.cpp pads the list of tokens to the rows of the embedding with type 5, unused."""
    types = metadata.get("tokenizer.ggml.token_type", ())
    size = len(metadata.get("tokenizer.ggml.tokens", ()))
    while size and size <= len(types) and types[size - 1] == 5:
        size -= 1
    return size


_LLAMA3 = RopeScaling("llama3", 8.0)
_LLAMA3_SIZES = {
    "vocab_size": 128_256, "num_kv_heads": 8, "head_dim": 128, "context_length": 131_072, "rope_theta": 500_000.0,
    "rope_scaling": _LLAMA3,
}  # fmt: skip
_QWEN3_SIZES = {
    "vocab_size": 151_936, "num_kv_heads": 8, "head_dim": 128, "context_length": 40_960, "rope_theta": 1_000_000.0,
    "norm_eps": 1e-6, "qk_norm": True,
}  # fmt: skip
_SMOLLM2_SIZES = {
    "vocab_size": 49_152, "head_dim": 64, "context_length": 8192, "rope_theta": 100_000.0, "tied_embeddings": True,
}  # fmt: skip

PRESETS: dict[str, ModelConfig] = {
    name: ModelConfig(hidden_size=width, intermediate_size=inner, num_layers=layers, num_heads=heads, **sizes)
    for name, width, inner, layers, heads, sizes in (
        ("llama-3.1-8b", 4096, 14_336, 32, 32, _LLAMA3_SIZES),
        ("llama-3.1-70b", 8192, 28_672, 80, 64, _LLAMA3_SIZES),
        ("qwen3-0.6b", 1024, 3072, 28, 16, _QWEN3_SIZES | {"tied_embeddings": True}),
        ("qwen3-8b", 4096, 12_288, 36, 32, _QWEN3_SIZES),
        ("qwen3-32b", 5120, 25_600, 64, 64, _QWEN3_SIZES),
        ("smollm2-135m", 576, 1536, 30, 9, _SMOLLM2_SIZES | {"num_kv_heads": 3}),
        ("smollm2-360m", 960, 2560, 32, 15, _SMOLLM2_SIZES | {"num_kv_heads": 5}),
        ("smollm2-1.7b", 2048, 8192, 24, 32, _SMOLLM2_SIZES | {"num_kv_heads": 32, "rope_theta": 130_000.0}),
    )
}
"""Sizes of published models, for accounting without their weights. Source: each one's `config.json`."""
