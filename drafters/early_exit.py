"""Early exit: the target's first layers draft for the whole of it.

Elhoushi et al. 2024 (LayerSkip, arXiv 2404.16710, section 3.3); Zhang et al. 2024 (Draft & Verify). The
first `exit_layer` layers, the final norm and the head are the target's own, and so are the cache slots:
drafts write the lower layers' part of the window, which verification writes again. The drafter adds no
weights and no cache. A trained exit norm has its place in `params`; the untrained one is the target's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from specjax.drafter import Drafter, chain_log_probs, draft_chain
from specjax.text import Tokenizer
from specjax.types import Draft, Keys, Model, Params, Target, Text


@dataclass(frozen=True)
class EarlyExit(Drafter):
    """the target's first layers, sharing its weights and its cache slots"""

    num_speculative_tokens: int = 4
    exit_layer: int = 0  # 0: two thirds of the target
    exit_norm: bool = False  # a norm of its own before the head, for training
    checkpoint: str = ""

    untrained: ClassVar[str] = "untrained exit"

    def layers(self, model: Model) -> tuple[int, int]:
        """Layers that run, for a given target."""
        return 0, self.exit_layer or max(1, 2 * model.num_layers // 3)

    def check(self, model: Model, tokenizer: Tokenizer | None = None) -> None:
        """The exit must lie inside the target."""
        if model.num_layers < 2:
            raise ValueError("a target of one layer has no earlier exit: use a deeper one")
        if not 0 <= self.exit_layer < model.num_layers:
            raise ValueError(
                f"exit_layer={self.exit_layer}: must be 1 to {model.num_layers - 1} for a target of "
                f"{model.num_layers} layers (0 takes two thirds of them)"
            )

    def init_params(self, key: Key[Array, ""], model: Model, target_params: Params) -> Params:
        """The exit norm, at first a copy of the target's final one; `{}` without."""
        return {"norm": {"weight": jnp.copy(target_params["norm"]["weight"])}} if self.exit_norm else {}

    def propose(self, keys: Keys, params: Params, state: PyTree[Array], target: Target) -> Draft:
        """Draft a chain on the target's cache with its first layers."""
        tokens, log_q, cache = draft_chain(
            keys, target, self.num_speculative_tokens, target.model, target.params | params, target.cache,
            layers=self.layers(target.model),
        )  # fmt: skip
        return Draft(tokens, log_q, cache, state)

    def log_probs(self, params: Params, text: Text) -> Float[Array, "B P K V"]:
        """One pass of the first layers."""
        return chain_log_probs(
            text, self.num_speculative_tokens, text.model, text.params | params, layers=self.layers(text.model)
        )
