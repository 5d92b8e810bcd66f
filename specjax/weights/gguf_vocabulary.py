"""A tokenizer from GGUF metadata: byte-level BPE (`gpt2`) or sentencepiece BPE with byte fallback (`llama`).

GGUF names the way in which text is cut before merging (`tokenizer.ggml.pre`) but does not store it; the
patterns are those of each model's own `tokenizer.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from specjax.model.config import gguf_vocab_size
from specjax.text import Tokenizer, end_ids

_CONTROL, _USER_DEFINED = 3, 4

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _LETTERS + r"|\p{N}{1,3}" + _REST
_QWEN2 = _LETTERS + r"|\p{N}" + _REST

_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_GPT2 = ("default", "gpt-2", "gpt2", "mpt", "olmo", "jais")
_PATTERNS = dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx"), _LLAMA3) | dict.fromkeys(
    ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), _QWEN2
)


def build(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that GGUF metadata describes.

    Raises:
      ValueError: no vocabulary in the file, or a kind that specjax does not read.
    """
    tokens = metadata.get("tokenizer.ggml.tokens", ())[: gguf_vocab_size(metadata)]
    kind = metadata.get("tokenizer.ggml.model")
    if not tokens or kind not in ("gpt2", "llama"):
        raise ValueError(
            f"the GGUF file holds a tokenizer of kind {kind!r}: specjax reads gpt2 and llama; "
            "use the model's Hugging Face checkpoint, which has a tokenizer.json"
        )
    backend = _byte_level(tokens, metadata) if kind == "gpt2" else _sentencepiece(tokens, metadata)
    types = metadata.get("tokenizer.ggml.token_type", ())
    for special, of_type in ((True, _CONTROL), (False, _USER_DEFINED)):
        added = [token for token, each in zip(tokens, types, strict=False) if each == of_type]
        backend.add_tokens([AddedToken(token, special=special, normalized=False) for token in added])

    ids = {
        name: metadata[f"tokenizer.ggml.{key}_token_id"]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    ends = [ids.get("eos"), *(metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eot", "eom"))]
    # llama.cpp's rule for files without the flag: sentencepiece and Llama 3 vocabularies begin with bos
    implied = kind == "llama" or _PATTERNS.get(metadata.get("tokenizer.ggml.pre", "")) == _LLAMA3
    return Tokenizer(
        backend=backend,
        bos_id=ids.get("bos"),
        add_bos=metadata.get("tokenizer.ggml.add_bos_token", implied and "bos" in ids),
        declared_end_ids=tuple(sorted(set(end_ids([end for end in ends if end is not None], "an end id of the file")))),
        chat_template=metadata.get("tokenizer.chat_template"),
        template_tokens=tuple((f"{name}_token", tokens[index]) for name, index in sorted(ids.items())),
    )


def _byte_level(tokens: list[str], metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(
        BPE({token: index for index, token in enumerate(tokens)}, merges, ignore_merges=_PATTERNS.get(name) == _LLAMA3)
    )
    if name in _PATTERNS:
        cut = pre_tokenizers.Split(Regex(_PATTERNS[name]), behavior="isolated")
        parts = [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    elif name in _SINGLE_DIGITS:
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    elif name in _GPT2:
        parts = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        known = ", ".join([*_PATTERNS, *_SINGLE_DIGITS, *_GPT2])
        raise ValueError(
            f"the GGUF file's pre-tokenizer {name!r} is not known: specjax has {known}; "
            "use the model's Hugging Face checkpoint, which has a tokenizer.json"
        )
    backend.pre_tokenizer = pre_tokenizers.Sequence(parts)
    backend.decoder = decoders.ByteLevel()
    if _PATTERNS.get(name) == _QWEN2:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(tokens: list[str], metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Sentencepiece BPE joins the neighbours whose joint token scores highest: merges in order of that score."""
    vocab = {token: index for index, token in enumerate(tokens)}
    scores = metadata["tokenizer.ggml.scores"]
    merges = []
    for token in sorted(vocab, key=lambda token: (-scores[vocab[token]], vocab[token])):
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        merges += sorted(
            (pair for pair in halves if set(pair) <= vocab.keys()), key=lambda p: (vocab[p[0]], vocab[p[1]])
        )
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    backend = tokenizers.Tokenizer(BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
    prefix = "first" if prefixed else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=prefix, split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefixed else parts)
    return backend
