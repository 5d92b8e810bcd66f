"""A strategy to be accounted for, from text: target preset, drafter and sizes, with weights as shapes."""

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
from specjax.memory.shapes import Account, Size, account, nbytes
from specjax.memory.state import Weights
from specjax.model import PRESETS, Llama, ModelConfig
from specjax.weights.huggingface import read_config

FP8 = "float8_e4m3fn"
"""As `Strategy.dtype`: the target's linear layers in e4m3 with a scale a channel, all else in bfloat16."""


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
        return _model(self.target, self.dtype, self.platform)

    def shapes(self) -> tuple[decode.Program, Weights, Weights]:
        """The program, the target's weights and the drafter's, as shapes."""
        return _shapes(self.target, self.drafter, self.window, self.dtype, self.platform)

    def options(self) -> dict[str, Any]:
        """Sizes, as the functions of `specjax.memory` take them."""
        cache_dtype = jnp.dtype(self.cache_dtype or _base(self.dtype))
        return {"batch": self.batch, "capacity": self.context, "cache_dtype": cache_dtype}

    def account(self, size: Size = nbytes) -> Account:
        """Its account, for a device that need not be here."""
        return account(*self.shapes(), **self.options(), size=size, backend=self.platform)

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
    """A drafter from its text; see `Strategy`."""
    settings: dict[str, str] = {}
    if not spec.partition(":")[0].endswith(".py"):
        spec, _, fields = spec.partition(":")
        for field in filter(None, fields.split(",")):
            name, equals, value = field.partition("=")
            settings |= {name: value} if equals else {"checkpoint": name}
    if spec == "external" and "checkpoint" in settings:
        preset(settings["checkpoint"])
    if window and spec != "none":
        settings.setdefault("num_speculative_tokens", str(window))
    return plugins.load_drafter(spec, settings)


@functools.lru_cache(maxsize=64)
def _shapes(target: str, spec: str, window: int, dtype: str, platform: str) -> tuple[decode.Program, Weights, Weights]:
    model, drafter = _model(target, dtype, platform), build(spec, window)
    drafter.check(model)
    params = _cast(model.shapes(), dtype)
    if getattr(drafter, "checkpoint", "") in PRESETS:  # weights that need not exist
        own = _cast(Llama(PRESETS[drafter.checkpoint]).shapes(), dtype)  # type: ignore[attr-defined]
    else:
        own = jax.eval_shape(lambda key, weights: drafter.params(key, model, weights), jax.random.key(0), params)
    return decode.Program(model, drafter), params, own


def _model(target: str, dtype: str, platform: str) -> Llama:
    return Llama.on(platform, dataclasses.replace(preset(target), quantized=dtype == FP8))


def _base(dtype: str) -> str:
    return "bfloat16" if dtype == FP8 else dtype


def _cast(tree: Weights, dtype: str) -> Weights:
    """All in one dtype, but for weights that are quantised."""
    kept = jnp.dtype(FP8)
    base = jnp.dtype(_base(dtype))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, kept if leaf.dtype == kept else base), tree)
