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
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from specjax import cache as kv
from specjax import weights
from specjax.drafter import Drafter, chain_log_probs, draft_chain, read_prompt
from specjax.model import PRESETS, Llama, ModelConfig
from specjax.text import Tokenizer, same_vocabulary
from specjax.types import Draft, Keys, Model, Params, Seen, Target, Text


@dataclass(frozen=True)
class External(Drafter):
    """a smaller model of the same tokenizer (by default a depth-pruned, untrained copy of the target)"""

    num_speculative_tokens: int = 4
    checkpoint: str = ""  # as `--target`: a path, a named source or a hub id (or a preset, for accounting)
    keep_layers: int = 0  # without a checkpoint: layers kept of the target, evenly spaced; 0: five sixths
    config: ModelConfig | None = dataclasses.field(default=None, init=False, repr=False)  # the checkpoint's

    untrained: ClassVar[str] = "depth-pruned copy of the target, untrained"

    def open_checkpoint(self) -> None:
        """Read the description of any model; where there is a trained drafter's card, it must be this one's."""
        if weights.has_card(self.checkpoint):
            super().open_checkpoint()
        if self.checkpoint:
            try:
                config = PRESETS.get(self.checkpoint) or weights.open_checkpoint(self.checkpoint).config
            except ValueError as error:
                raise ValueError(f"{error}; to account for sizes alone, one of {', '.join(PRESETS)}") from error
            object.__setattr__(self, "config", config)

    @property
    def files(self) -> tuple[Path, ...]:
        """Those of the checkpoint."""
        return weights.open_checkpoint(self.checkpoint).files if self.checkpoint else ()

    def model(self, target: Model) -> Model:
        """The drafter's own decoder."""
        if self.config is not None:
            lanes = target.config.cache_lanes if isinstance(target, Llama) else 1
            return Llama(dataclasses.replace(self.config, cache_lanes=lanes))
        assert isinstance(target, Llama)
        return Llama(dataclasses.replace(target.config, num_layers=len(self.kept(target))))

    def kept(self, target: Model) -> list[int]:
        """Layers of the target that the pruned copy keeps: the first, the last, and evenly between."""
        count = self.keep_layers or max(1, 5 * target.num_layers // 6)
        return [round(i * (target.num_layers - 1) / max(1, count - 1)) for i in range(count)]

    def check(self, model: Model, tokenizer: Tokenizer | None = None) -> None:
        """The vocabularies must agree, id by id; a pruned copy can't have more layers than the target."""
        if self.config is None:
            if not 0 <= self.keep_layers <= model.num_layers:
                bounds = f"must be 1 to {model.num_layers} (0 keeps five sixths)"
                raise ValueError(f"keep_layers={self.keep_layers}: {bounds}")
            return
        if self.config.vocab_size != model.vocab_size:
            raise ValueError(
                f"draft vocabulary {self.config.vocab_size} ≠ target vocabulary {model.vocab_size}: "
                "use a drafter that was trained for this tokenizer"
            )
        if tokenizer is not None:
            same_vocabulary(weights.open_checkpoint(self.checkpoint).tokenizer(), tokenizer)

    def init_params(self, key: Key[Array, ""], model: Model, target_params: Params) -> Params:
        """Copies of the kept layers; random weights of a checkpoint's sizes, whose own are read by `params`."""
        if self.config is not None:
            return Llama(self.config).init(key, jax.tree.leaves(target_params)[0].dtype)
        kept = {new: target_params["layers"][old] for new, old in enumerate(self.kept(model))}
        return jax.tree.map(jnp.copy, target_params | {"layers": kept})

    def params(self, key: Key[Array, ""], model: Model, target_params: Params) -> Params:
        """The checkpoint's weights in the target's dtype."""
        if not self.checkpoint:
            return self.init_params(key, model, target_params)
        return weights.open_checkpoint(self.checkpoint).load(jax.tree.leaves(target_params)[0].dtype)

    def init(self, params: Params, model: Model, batch: int, capacity: int, dtype: Any) -> PyTree[Array]:
        """A cache of its own."""
        return self.model(model).init_cache(batch, capacity, dtype)

    def observe(self, params: Params, state: Any, seen: Seen) -> PyTree[Array]:
        """Read the prompt as the target does."""
        return read_prompt(self.model(seen.target.model), params, state, seen)

    def scratch(self, state: PyTree[Array], length: Int[Array, "B"]) -> PyTree[Bool[Array, "..."]]:
        """The last two tokens are read again."""
        return kv.scratch(state, length - 2)

    def propose(self, keys: Keys, params: Params, state: Any, target: Target) -> Draft:
        """Draft a chain on its own cache."""
        tokens, log_q, cache = draft_chain(
            keys, target, self.num_speculative_tokens, self.model(target.model), params, state, reread=2
        )
        return Draft(tokens, log_q, target.cache, cache)

    def log_probs(self, params: Params, text: Text) -> Float[Array, "B P K V"]:
        """One pass of its own model."""
        return chain_log_probs(text, self.num_speculative_tokens, self.model(text.model), params)
