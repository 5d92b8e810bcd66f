"""A target whose description was read and whose weights were not: enough to check everything that is asked of it."""

from __future__ import annotations

from dataclasses import dataclass

from specjax import weights
from specjax.engine import MAX_END_IDS
from specjax.model import Llama
from specjax.text import Tokenizer
from specjax.types import Params

DEFAULT_TARGET = "smollm2-135m"


@dataclass(frozen=True, eq=False)
class OpenedTarget:
    """A checkpoint with its model and tokenizer."""

    checkpoint: weights.Checkpoint
    model: Llama
    tokenizer: Tokenizer
    dtype: str

    def load(self) -> Params:
        """Read the weights."""
        return self.checkpoint.load(self.dtype)

    def encode(self, text: str, system: str | None, raw: bool = False) -> list[int]:
        """Ids of a prompt, through the chat template where the checkpoint has one and it is not to be left out."""
        chat = self.tokenizer.chat_template is not None and not raw
        if system is not None and not chat and not raw:
            raise ValueError("--system needs a chat template, which this checkpoint does not have: leave it out")
        ids = self.tokenizer.chat(text, system) if chat else self.tokenizer.encode(text)
        if max(ids, default=0) >= self.model.vocab_size:
            raise ValueError(
                f"the tokenizer gives id {max(ids)} ({self.tokenizer.backend.id_to_token(max(ids))!r}), the target has "
                f"{self.model.vocab_size} ids: tokenizer and weights do not belong together"
            )
        return ids


def open_target(source: str = DEFAULT_TARGET, dtype: str | None = None) -> OpenedTarget:
    """Find a target and read its description.

    Raises:
      ValueError: no such checkpoint, or one that specjax can't serve.
    """
    checkpoint = weights.open_checkpoint(source)
    tokenizer = checkpoint.tokenizer()
    if len(tokenizer.end_ids) > MAX_END_IDS:
        raise ValueError(f"{source} has {len(tokenizer.end_ids)} end ids: at most {MAX_END_IDS} are supported")
    return OpenedTarget(checkpoint, checkpoint.model, tokenizer, dtype or weights.default_dtype().__name__)
