"""A target, loaded: model, weights and tokenizer, from whatever `specjax.weights` can open or from memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from specjax import weights
from specjax.drafter import Drafter
from specjax.model import Llama
from specjax.text import Tokenizer
from specjax.types import Model, Params

MAX_END_IDS = 8


@dataclass(frozen=True, eq=False, repr=False)
class LanguageModel:
    """A model with its weights, which are read when they are first asked for, so that checks can come before."""

    name: str
    model: Model
    tokenizer: Tokenizer | None = None
    dtype: str = "float32"  # of the weights
    checkpoint: weights.Checkpoint | None = None  # None: its weights are in memory only

    @classmethod
    def of(
        cls, model: Model, params: Params, tokenizer: Tokenizer | None = None, name: str = "in memory"
    ) -> LanguageModel:
        """A model that was made rather than loaded."""
        made = cls(name, model, tokenizer, jax.tree.leaves(params)[0].dtype.name)
        vars(made)["params"] = params
        return made

    @functools.cached_property
    def params(self) -> Params:
        """The weights.

        Raises:
          ValueError: they don't fit the model's description, are not finite, or their file is damaged.
        """
        if self.checkpoint is None:
            raise ValueError(f"{self.name} has no weights: load_target reads them, LanguageModel.of takes them")
        return self.checkpoint.load(self.dtype)

    @property
    def llama(self) -> Llama:
        """The model, where it is one that the accountant knows the sizes of.

        Raises:
          ValueError: it is another one.
        """
        if not isinstance(self.model, Llama):
            raise ValueError(f"{self.name} is no decoder of specjax.model: use specjax.memory.account with its weights")
        return self.model

    @functools.cached_property
    def fingerprint(self) -> weights.TargetIdentity:
        """What a trained drafter remembers of it: sizes, and the hash of its files (or arrays)."""
        sha256 = weights.hash_params(self.params) if self.checkpoint is None else self.checkpoint.sha256
        return weights.TargetIdentity.of(self.name, self.model, sha256)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end a text; none without a tokenizer."""
        return () if self.tokenizer is None else self.tokenizer.end_ids

    def encode(self, text: str, system: str | None = None, raw: bool = False) -> list[int]:
        """Ids of a prompt, through the chat template where there is one.

        Args:
          system: system prompt, which needs a chat template.
          raw: leave the template out.

        Raises:
          ValueError: no tokenizer or no template for it; a text that is no Unicode, or ids that the model lacks.
        """
        if self.tokenizer is None:
            raise ValueError(f"{self.name} has no tokenizer: give token ids instead of text")
        chat = self.tokenizer.chat_template is not None and not raw
        if system is not None and not chat and not raw:
            raise ValueError("a system prompt needs a chat template, which this checkpoint does not have: leave it out")
        ids = self.tokenizer.chat(text, system) if chat else self.tokenizer.encode(text)
        if max(ids, default=0) >= self.model.vocab_size:
            raise ValueError(
                f"the tokenizer gives id {max(ids)} ({self.tokenizer.backend.id_to_token(max(ids))!r}), the target has "
                f"{self.model.vocab_size} ids: tokenizer and weights do not belong together"
            )
        return ids

    def check(self, drafter: Drafter) -> None:
        """Refuse a drafter that can't serve this target, before any weights are read.

        Raises:
          ValueError: with the reason: other vocabularies, too long a window, or weights trained for another target.
        """
        drafter.check(self.model, self.tokenizer)
        if drafter.num_speculative_tokens >= self.model.context_length:
            raise ValueError(
                f"num_speculative_tokens={drafter.num_speculative_tokens}: must be smaller than the target's "
                f"context of {self.model.context_length} tokens"
            )
        if drafter.checkpoint and weights.has_card(drafter.checkpoint):
            weights.read_card(drafter.checkpoint).check_target(self.fingerprint)

    def __repr__(self) -> str:
        ids, context = self.model.vocab_size, self.model.context_length
        return f"<{self.name}: {self.model.num_layers} layers, {ids} ids, context of {context}, {self.dtype}>"


def load_target(source: str, *, dtype: Any = None) -> LanguageModel:
    """Find a model and read its description and tokenizer; its weights are read when they are first used.

    Args:
      source: a GGUF file, a checkpoint's folder, a name such as `smollm2-135m`, or a Hugging Face id (org/name).
      dtype: of weights that are not quantised; by default bfloat16 where the hardware multiplies it, else float32.

    Raises:
      ValueError: nothing there, a damaged file, a model that specjax does not have, or no way to fetch it.
    """
    checkpoint = weights.open_checkpoint(source)
    tokenizer = checkpoint.tokenizer()
    if len(tokenizer.end_ids) > MAX_END_IDS:
        raise ValueError(f"{source} has {len(tokenizer.end_ids)} end ids: at most {MAX_END_IDS} are supported")
    name = jnp.dtype(weights.default_dtype() if dtype is None else dtype).name
    return LanguageModel(checkpoint.name, checkpoint.model, tokenizer, name, checkpoint)
