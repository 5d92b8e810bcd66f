"""A strategy to be accounted for: target, drafter and sizes, with weights as shapes; neither need be here."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax import decode, plugins
from specjax.drafter import Drafter
from specjax.language_model import LanguageModel
from specjax.memory import hardware
from specjax.memory.account import Account, account
from specjax.memory.round_trace import Weights
from specjax.mesh import Layout
from specjax.model import PRESETS, Llama, ModelConfig
from specjax.weights.huggingface import read_config

FP8 = "float8_e4m3fn"
"""As a dtype: the target's linear layers in e4m3 with a scale a channel, all else in bfloat16."""
DRAFTERS = ("ngram", "early-exit", "fp8")
"""Those that a command accounts for beside `none` unless it is told which."""


def account_for(
    target: LanguageModel | Llama | str,
    drafter: str | Drafter,
    *,
    batch: int,
    context: int,
    device: str | None = None,
    mesh: str = "1",
    data: int = 1,
    window: int = 0,
    dtype: str = "",
    cache_dtype: str = "",
) -> Account:
    """What a strategy holds on one device of a mesh beside plain decoding, from shapes: no weights are read.

    Args:
      target: a loaded target, a model, the name of a preset, or the path of a `config.json`.
      drafter: a drafter, or its text as `--drafter` takes it (`ngram`, `external:llama-3.1-8b`).
      context: cache slots a row.
      device: a name of `specjax.memory.hardware.DEVICES`, or `this`; by default this process's backend, unmeasured.
      mesh: chips, as `8` or `2x2x2`; `data`: copies of the model in it, each for a part of the rows.
      window: drafted tokens a round, for a drafter given as text; 0 is its own.
      dtype: of the weights, or `float8_e4m3fn`; by default a loaded target's own, else bfloat16. `cache_dtype`: of
        the caches, by default the same.

    Raises:
      ValueError: a name, size or mesh that makes no sense, with the rule; a drafter that can't serve the target.
    """
    built = build(drafter, window) if isinstance(drafter, str) else drafter
    if isinstance(target, LanguageModel):
        target.check(built)
        own, target = target.dtype, target.llama
        dtype = dtype or (FP8 if target.config.quantized else own)
    dtype = dtype or "bfloat16"
    config = preset(target) if isinstance(target, str) else target.config
    found, layout = hardware.place(device, mesh, data, config, batch) if device else (None, Layout())
    platform = found.platform if found else jax.default_backend()
    model = _on(platform, config, dtype)
    sizes: dict[str, Any] = {"batch": batch, "capacity": context, "cache_dtype": cache_dtype or _base(dtype)}
    return account(*_shapes(model, built, dtype), **sizes, layout=layout, backend=platform, device=found)


@dataclass(frozen=True)
class Strategy:
    """What is decoded and how: plain values, so that it can be sent to another process.

    `drafter` is a name or file as `--drafter` takes it, or `external:PRESET`, or with fields as
    `fp8:kv=own,num_speculative_tokens=3`. `window` 0 leaves the drafter's own default.
    """

    target: str
    drafter: str
    batch: int
    context: int
    window: int = 0
    dtype: str = "bfloat16"
    cache_dtype: str = ""  # empty: as dtype
    platform: str = "tpu"  # or gpu, or cpu: what it runs on decides on padding and copies

    @property
    def model(self) -> Llama:
        """The target's decoder."""
        return _on(self.platform, preset(self.target), self.dtype)

    def shapes(self) -> tuple[decode.Program, Weights, Weights]:
        """The program, the target's weights and the drafter's, as shapes."""
        return _shapes(self.model, build(self.drafter, self.window), self.dtype)

    def options(self) -> dict[str, Any]:
        """Sizes, as the functions of `specjax.memory` take them."""
        cache_dtype = jnp.dtype(self.cache_dtype or _base(self.dtype))
        return {"batch": self.batch, "capacity": self.context, "cache_dtype": cache_dtype}

    def account(self, layout: Layout = Layout()) -> Account:  # noqa: B008  (frozen)
        """Its account, for a device that need not be here."""
        return account(*self.shapes(), **self.options(), layout=layout, backend=self.platform)

    def asdict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def preset(name: str) -> ModelConfig:
    """Sizes of a published model by its name, or of any whose `config.json` (or its folder) is here.

    Raises:
      ValueError: an unknown name, with the known ones; a description that lacks a size, with the missing one.
    """
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if path.suffix == ".json" and path.is_file():
        return read_config(path)
    raise ValueError(
        f"no sizes for target {name!r}: choose from {', '.join(PRESETS)}, or give a model's config.json "
        "(its weights need not be there)"
    )


def build(spec: str, window: int = 0) -> Drafter:
    """A drafter from its text, with a window where the text leaves it open."""
    return plugins.load_drafter(spec, {"num_speculative_tokens": str(window)} if window and spec != "none" else {})


@functools.lru_cache(maxsize=64)
def _shapes(model: Llama, drafter: Drafter, dtype: str) -> tuple[decode.Program, Weights, Weights]:
    drafter.check(model)
    params = _cast(model.shapes(), dtype)
    if drafter.checkpoint in PRESETS:  # weights that need not exist
        own = _cast(Llama(PRESETS[drafter.checkpoint]).shapes(), dtype)
    else:
        own = jax.eval_shape(lambda key, weights: drafter.params(key, model, weights), jax.random.key(0), params)
    return decode.Program(model, drafter), params, own


def _on(platform: str, config: ModelConfig, dtype: str) -> Llama:
    return Llama.on(platform, dataclasses.replace(config, quantized=dtype == FP8))


def _base(dtype: str) -> str:
    return "bfloat16" if dtype == FP8 else dtype


def _cast(tree: Weights, dtype: str) -> Weights:
    """All in one dtype, but for weights that are quantised."""
    kept = jnp.dtype(FP8)
    base = jnp.dtype(_base(dtype))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, kept if leaf.dtype == kept else base), tree)
