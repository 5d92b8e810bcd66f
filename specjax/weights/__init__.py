"""Models on disk: `open_checkpoint(source)` finds one, describes it, and streams its weights.

checkpoint = open_checkpoint("smollm2-135m")
params = checkpoint.load()
ids = checkpoint.tokenizer().chat("Why is the sky blue?")
"""

from specjax.weights.checkpoint import Checkpoint, DamagedFile, default_dtype
from specjax.weights.native import save
from specjax.weights.sources import open_checkpoint

__all__ = ["Checkpoint", "DamagedFile", "default_dtype", "open_checkpoint", "save"]
