"""The decoder of the Llama family, defined with flax.nnx and applied as a pure function.

nnx only describes the modules: they are split once into a graph and a plain dict of weights, whose paths
are the tensor names of a Hugging Face checkpoint, and merged inside `jit`. Each layer is a call of one
function under `jit`: it is traced once, not once a layer, and XLA inlines it.

Weights of linear layers are `[out, in]` and stand on the left of the product. On CPU, XLA's product of a
few rows with a weight of `[in, out]` packs the whole weight first: 4 to 8 rows then cost twice as much.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PyTree

from specjax import cache as kv
from specjax.model.config import ModelConfig
from specjax.model.positions import rotary_factors, rotate, visible_slots, whole_text
from specjax.types import Cache, Forward, Params

FP8 = jnp.float8_e4m3fn
LayerCache = tuple[Float[Array, "B G T W"], Float[Array, "B G T W"]]


class Linear(nnx.Module):
    """`x @ weight.T`, with a scale an output channel where the weight is quantised."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, quantized: bool, rngs: nnx.Rngs):
        weight = jax.random.normal(rngs.params(), (outputs, inputs)) / math.sqrt(inputs)
        self.weight = nnx.Param(weight.astype(FP8) if quantized else weight)
        self.scale = nnx.Param(jnp.ones((outputs,))) if quantized else None
        self.bias = nnx.Param(jnp.zeros((outputs,))) if bias else None

    def __call__(self, x: Float[Array, "B S I"]) -> Float[Array, "B S O"]:
        y = project(x, self.weight[...])
        if self.scale is not None:
            y = y * self.scale[...].astype(y.dtype)[None, None]
        if self.bias is not None:
            y = y + self.bias[...].astype(y.dtype)[None, None]
        return y


def project(x: Float[Array, "B S I"], weight: Float[Array, "O I"]) -> Float[Array, "B S O"]:
    """`x @ weight.T` in the dtype of `x`, weight first (see the head of this file)."""
    return jnp.transpose(jnp.einsum("oi,bsi->obs", weight.astype(x.dtype), x), (1, 2, 0))


class RMSNorm(nnx.Module):
    def __init__(self, width: int, eps: float):
        self.weight = nnx.Param(jnp.ones((width,)))
        self.eps = eps

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        return normalize(x, self.weight[...], self.eps)


def normalize(x: Float[Array, "*B D"], weight: Float[Array, "D"], eps: float) -> Float[Array, "*B D"]:
    """Divide by the root of the mean square, computed in float32 (Zhang and Sennrich 2019, arXiv 1910.07467)."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight.reshape((1,) * (x.ndim - 1) + (-1,)).astype(x.dtype)


class Attention(nnx.Module):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        linear = functools.partial(Linear, quantized=config.quantized, rngs=rngs)
        inner, inner_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = linear(config.hidden_size, inner, bias=config.attention_bias)
        self.k_proj = linear(config.hidden_size, inner_kv, bias=config.attention_bias)
        self.v_proj = linear(config.hidden_size, inner_kv, bias=config.attention_bias)
        self.o_proj = linear(inner, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.config = config

    def __call__(
        self,
        x: Float[Array, "B S D"],
        layer: LayerCache | None,
        start: Int[Array, "B"],
        rotary: tuple[Float[Array, "B S 1 half"], Float[Array, "B S 1 half"]],
        visible: Bool[Array, "B S T"],
    ) -> tuple[Float[Array, "B S D"], LayerCache | None]:
        c = self.config
        batch, queries, _ = x.shape
        q = self.q_proj(x).reshape(batch, queries, c.num_heads, c.head_dim)
        k = self.k_proj(x).reshape(batch, queries, c.num_kv_heads, c.head_dim)
        v = self.v_proj(x).reshape(batch, queries, c.num_kv_heads, c.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, rotary), rotate(k, rotary)
        # 0 · NaN is NaN: one drafted token that overflows would poison every query. In the key, a mask hides it.
        finite = jnp.all(jnp.isfinite(v), -1, keepdims=True)
        k, v = jnp.where(finite, k, jnp.nan), jnp.where(finite, v, 0)
        if layer is not None and (padding := layer[0].shape[3] - c.head_dim):
            q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, padding))) for x in (q, k, v))
        keys, values = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
        if layer is not None:
            layer = keys, values = kv.write(layer[0], keys, start), kv.write(layer[1], values, start)

        q = q.reshape(batch, queries, c.num_kv_heads, c.num_heads // c.num_kv_heads, q.shape[3])
        scores = jnp.einsum("bsgrd,bgtd->bgrst", q, keys.astype(q.dtype), preferred_element_type=jnp.float32)
        scores = jnp.where(visible[:, None, None], scores * (1 / math.sqrt(c.head_dim)), -jnp.inf)
        weights = jax.nn.softmax(scores, -1).astype(q.dtype)
        # Turned after the product: asked for "bsgrd", a GPU with one head copies all values to [B,G,W,T].
        mixed = jnp.einsum("bgrst,bgtd->bgrsd", weights, values.astype(q.dtype)).transpose(0, 3, 1, 2, 4)
        mixed = mixed[..., : c.head_dim]
        return self.o_proj(mixed.reshape(batch, queries, c.num_heads * c.head_dim)), layer


class MLP(nnx.Module):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        linear = functools.partial(Linear, bias=False, quantized=config.quantized, rngs=rngs)
        self.gate_proj = linear(config.hidden_size, config.intermediate_size)
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size)

    def __call__(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config, rngs)


class Embedding(nnx.Module):
    def __init__(self, rows: int, width: int, rngs: nnx.Rngs):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (rows, width)) / math.sqrt(width))


class Decoder(nnx.Module):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.embed_tokens = Embedding(config.padded_vocab_size, config.hidden_size, rngs)
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = None if config.tied_embeddings else Embedding(config.padded_vocab_size, config.hidden_size, rngs)


@functools.cache
def _split(
    kind: Callable[[ModelConfig, nnx.Rngs], nnx.Module], config: ModelConfig
) -> tuple[nnx.GraphDef[Any], nnx.State]:
    return nnx.split(nnx.eval_shape(lambda: kind(config, nnx.Rngs(0))))


@functools.partial(jax.jit, static_argnames=("config",))
def _run_layer(
    config: ModelConfig,
    params: Params,
    x: Float[Array, "B S D"],
    cache: LayerCache | None,
    start: Int[Array, "B"],
    rotary: tuple[Float[Array, "B S 1 half"], Float[Array, "B S 1 half"]],
    visible: Bool[Array, "B S T"],
) -> tuple[Float[Array, "B S D"], LayerCache | None]:
    graph, state = _split(Layer, config)
    state = jax.tree.map(lambda leaf: leaf, state)
    nnx.replace_by_pure_dict(state, params)
    layer: Layer = nnx.merge(graph, state)
    mixed, cache = layer.self_attn(layer.input_layernorm(x), cache, start, rotary, visible)
    x = x + mixed
    return x + layer.mlp(layer.post_attention_layernorm(x)), cache


@dataclass(frozen=True)
class Llama:
    """A decoder as a value: its configuration. Weights are an argument of every method.

    Its methods are those of `specjax.types.Model`. What a drafter needs of its own it makes of the same parts: a
    single layer is a `Llama` of one, whose `forward` takes hidden states.
    """

    config: ModelConfig

    @classmethod
    def on(cls, platform: str, config: ModelConfig) -> Llama:
        """The decoder, with a cache as that platform stores it (`specjax.cache.LANES`)."""
        return cls(dataclasses.replace(config, cache_lanes=kv.LANES.get(platform, 1)))

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def context_length(self) -> int:
        return self.config.context_length

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    def shapes(self) -> PyTree[jax.ShapeDtypeStruct]:
        """The weights as `jax.ShapeDtypeStruct`s, under the names of a Hugging Face checkpoint.

        All layers have those of the first, which alone is built: flax takes seconds for 80 of them.
        """
        whole = nnx.to_pure_dict(_split(Decoder, dataclasses.replace(self.config, num_layers=1))[1])
        layers = {index: jax.tree.map(lambda leaf: leaf, whole["layers"][0]) for index in range(self.num_layers)}
        return whole | {"layers": layers}

    def init(self, key: Array, dtype: Any = jnp.float32) -> Params:
        """Random weights (quantised ones stay e4m3)."""
        params = nnx.to_pure_dict(nnx.split(Decoder(self.config, nnx.Rngs(params=key)))[1])
        return jax.tree.map(lambda leaf: leaf if leaf.dtype == FP8 else leaf.astype(dtype), params)

    def init_cache(self, batch: int, capacity: int, dtype: Any) -> Cache:
        c = self.config
        return kv.init_cache(c.num_layers, batch, c.num_kv_heads, capacity, kv.padded(c.head_dim, c.cache_lanes), dtype)

    def embed(self, params: Params, tokens: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        """Rows of the embedding; ids outside of it are clipped."""
        weight = params["embed_tokens"]["weight"]
        return weight.at[jnp.clip(tokens, 0, weight.shape[0] - 1)].get(mode="clip")

    def forward(
        self,
        params: Params,
        inputs: Int[Array, "B S"] | Float[Array, "B S D"],
        cache: Cache | None,
        start: Int[Array, "B"],
        *,
        positions: Int[Array, "B M"] | None = None,
        mask: Bool[Array, "S M"] | Bool[Array, "B S M"] | None = None,
        layers: tuple[int, int] | None = None,
        taps: tuple[int, ...] = (),
        documents: Int[Array, "B S"] | None = None,
    ) -> Forward:
        """See `specjax.types.Model.forward`; keys and values of the layers that run are written to the cache."""
        x = self.embed(params, inputs) if jnp.issubdtype(inputs.dtype, jnp.integer) else inputs
        queries = x.shape[1]
        if cache is None:
            at, visible = whole_text(start, queries, documents, self.config.sliding_window)
        else:
            steps = jnp.arange(queries, dtype=start.dtype)
            at = start[:, None] + steps[None] if positions is None else positions
            visible = visible_slots(cache.capacity, start, queries, at, mask, self.config.sliding_window)
        first, behind = layers or (0, self.num_layers)
        if not all(first < tap <= behind for tap in taps):
            raise ValueError(f"taps {taps}: layers {first + 1} to {behind} run, counted from 1")
        rotary = rotary_factors(at[:, -queries:], self.config, x.dtype)

        stored: list[Any] = [None] * self.num_layers if cache is None else list(cache.layers)
        kept = {}
        for index in range(first, behind):
            x, stored[index] = _run_layer(
                self.config, params["layers"][index], x, stored[index], start, rotary, visible
            )
            if index + 1 in taps:
                kept[index + 1] = x
        return Forward(x, tuple(kept[tap] for tap in taps), Cache(() if cache is None else tuple(stored)))

    def logits(self, params: Params, hidden: Float[Array, "B S D"]) -> Float[Array, "B S V"]:
        """Final norm and head, in float32; only real ids have columns."""
        hidden = normalize(hidden, params["norm"]["weight"], self.config.norm_eps)
        head = params["embed_tokens" if self.config.tied_embeddings else "lm_head"]["weight"]
        return project(hidden, head)[..., : self.vocab_size].astype(jnp.float32)
