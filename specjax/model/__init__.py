"""Decoders and their descriptions."""

from specjax.model.config import PRESETS, ModelConfig, RopeScaling
from specjax.model.decoder import Llama

__all__ = ["PRESETS", "Llama", "ModelConfig", "RopeScaling"]
