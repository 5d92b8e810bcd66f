"""Models and trained drafters on disk: `open_checkpoint(source)` finds a model, describes it, and streams its weights.

checkpoint = open_checkpoint("smollm2-135m")
params = checkpoint.load()
ids = checkpoint.tokenizer().chat("Why is the sky blue?")
"""

from specjax.weights.card import CARD, Card, TargetIdentity, has_card, read_card
from specjax.weights.checkpoint import Checkpoint, DamagedFile, default_dtype, outline
from specjax.weights.native import save
from specjax.weights.sources import open_checkpoint
from specjax.weights.trained import hash_params, load_drafter_params, save_drafter

__all__ = [
    "CARD",
    "Card",
    "Checkpoint",
    "DamagedFile",
    "TargetIdentity",
    "default_dtype",
    "has_card",
    "hash_params",
    "load_drafter_params",
    "open_checkpoint",
    "outline",
    "read_card",
    "save",
    "save_drafter",
]
