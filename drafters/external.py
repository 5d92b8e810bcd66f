"""An external drafter: any checkpoint that shares the target's tokenizer, with a cache of its own.

Leviathan et al. 2023 (arXiv 2211.17192); Chen et al. 2023 (arXiv 2302.01318). Each round feeds the last
two committed tokens again: the writes are the same ones, and the draft that was accepted last but never
fed is made up for. Without a `checkpoint` the drafter is a depth-pruned copy of the target, a stand-in
until one is trained. It keeps five sixths of the layers: on text that SmolLM2-135M sampled itself, sum
min(p, q) is 0.03 with 15 of its 30 layers, 0.08 with 20, 0.32 with 23, 0.52 with 25 and 0.51 with 27.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from specjax import decode, weights
from specjax.drafter import Drafter, draft_chain
from specjax.model import PRESETS, Llama
from specjax.text import Tokenizer, same_vocabulary
from specjax.types import Draft, Keys, Model, Params, Target


@dataclass(frozen=True)
class External(Drafter):
    """a smaller model of the same tokenizer (by default a depth-pruned, untrained copy of the target)"""

    num_speculative_tokens: int = 4
    checkpoint: str = ""  # as `--target`: a path, a named source or a hub id (or a preset, for accounting)
    keep_layers: int = 0  # without a checkpoint: layers kept of the target, evenly spaced; 0: five sixths

    opens_models: ClassVar[bool] = True

    @property
    def label(self) -> str:
        """A pruned copy must not pass for a trained drafter."""
        return "" if self.checkpoint else "depth-pruned copy of the target, untrained"

    @property
    def files(self) -> tuple[Path, ...]:
        """Those of the checkpoint."""
        return weights.open_checkpoint(self.checkpoint).files if self.checkpoint else ()

    def model(self, target: Model) -> Model:
        """The drafter's own decoder."""
        if self.checkpoint:
            config = PRESETS.get(self.checkpoint) or weights.open_checkpoint(self.checkpoint).config
            lanes = target.config.cache_lanes if isinstance(target, Llama) else 1
            return Llama(dataclasses.replace(config, cache_lanes=lanes))
        assert isinstance(target, Llama)
        return Llama(dataclasses.replace(target.config, num_layers=len(self.kept(target))))

    def kept(self, target: Model) -> list[int]:
        """Layers of the target that the pruned copy keeps: the first, the last, and evenly between."""
        count = self.keep_layers or max(1, 5 * target.num_layers // 6)
        return [round(i * (target.num_layers - 1) / max(1, count - 1)) for i in range(count)]

    def check(self, model: Model, tokenizer: Tokenizer | None = None) -> None:
        """The vocabularies must agree, id by id; a pruned copy can't have more layers than the target."""
        if not self.checkpoint:
            if not 0 <= self.keep_layers <= model.num_layers:
                bounds = f"must be 1 to {model.num_layers} (0 keeps five sixths)"
                raise ValueError(f"keep_layers={self.keep_layers}: {bounds}")
            return
        if self.model(model).vocab_size != model.vocab_size:
            raise ValueError(
                f"draft vocabulary {self.model(model).vocab_size} ≠ target vocabulary {model.vocab_size}: "
                "use a drafter that was trained for this tokenizer"
            )
        if tokenizer is not None:
            same_vocabulary(weights.open_checkpoint(self.checkpoint).tokenizer(), tokenizer)

    def params(self, key: Key[Array, ""], model: Model, target_params: Params) -> Params:
        """The checkpoint's weights in the target's dtype, or copies of the kept layers."""
        if self.checkpoint:
            return weights.open_checkpoint(self.checkpoint).load(jax.tree.leaves(target_params)[0].dtype)
        kept = {new: target_params["layers"][old] for new, old in enumerate(self.kept(model))}
        return jax.tree.map(jnp.copy, target_params | {"layers": kept})

    def init(self, params: Params, target: Target) -> PyTree[Array]:
        """A cache of its own, filled with the prompt."""
        model = self.model(target.model)
        batch, slots = target.tokens.shape
        cache = model.init_cache(batch, slots, target.cache[0][0].dtype)
        return decode.prefill(model, params, target.tokens, target.length - 1, cache)[2]

    def propose(self, keys: Keys, params: Params, state: Any, target: Target) -> Draft:
        """Draft a chain on its own cache."""
        tokens, log_q, cache = draft_chain(
            keys, target, self.num_speculative_tokens, self.model(target.model), params, state, reread=2
        )
        count = jnp.full(target.length.shape, self.num_speculative_tokens, jnp.int32)
        return Draft(tokens, log_q, count, target.cache, cache)
