"""Text to token ids and back: the model's own tokenizer, its chat template, and detokenisation as tokens come.

One tokenizer is made from either source (`tokenizer.json` or GGUF metadata), and every entry point encodes
through the same two methods, so the same prompt string always gives the same ids.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from specjax import chat_template

Message = Mapping[str, str]

END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>", "<end_of_turn>")
"""Tokens that end an answer even where a checkpoint declares only another one (as in llama.cpp)."""


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer with what the model's makers say about its use.

    `declared_end_ids` are the checkpoint's; `end_ids` adds the known end-of-turn tokens of the vocabulary.
    """

    backend: tokenizers.Tokenizer
    bos_id: int | None = None
    add_bos: bool = False  # does `encode` begin with it? Chat templates write it themselves
    declared_end_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    template_tokens: tuple[tuple[str, str], ...] = ()  # bos_token, eos_token ... as the template may name them

    def __post_init__(self) -> None:
        if self.add_bos and self.bos_id is None:
            raise ValueError(
                "the tokenizer is to begin prompts with a bos token but names none: fix its tokenizer_config.json"
            )

    @functools.cached_property
    def vocab(self) -> dict[str, int]:
        """Every token, added ones too, with its id."""
        return self.backend.get_vocab(with_added_tokens=True)

    @functools.cached_property
    def vocab_size(self) -> int:
        """Ids that a token can have; rows of an embedding beyond it are padding."""
        return max(self.vocab.values()) + 1

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens, which `decode` leaves out."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @functools.cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end a generated text, in rising order."""
        turn = {self.vocab[token] for token in END_OF_TURN if self.vocab.get(token) in self.special_ids}
        return tuple(sorted(turn | set(self.declared_end_ids)))

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt, with the bos token if the model's own tokenizer puts one there."""
        ids = self._ids(text)
        return [self.bos_id, *ids] if self.add_bos and self.bos_id is not None else ids

    def chat(self, messages: str | Sequence[Message], system: str | None = None) -> list[int]:
        """Ids of a conversation, up to where the assistant's answer begins.

        Args:
          messages: `{"role": ..., "content": ...}` in order; a string is one message of the user.
          system: system prompt; without it the template's own default stands, if it has one.

        Raises:
          ValueError: no chat template, or one that refuses the conversation.
        """
        return self._ids(self.render(messages, system))

    def _ids(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text holds half a character at place {error.start}: it is no valid Unicode"
            ) from error
        return self.backend.encode(text, add_special_tokens=False).ids

    def render(self, messages: str | Sequence[Message], system: str | None = None) -> str:
        """The conversation as the text that `chat` encodes."""
        if self.chat_template is None:
            raise ValueError(
                "this checkpoint has no chat template: pass its prompt to encode(), or use an instruct model"
            )
        turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else [dict(m) for m in messages]
        if system is not None:
            turns.insert(0, {"role": "system", "content": system})
        try:
            values = {"messages": turns, "add_generation_prompt": True, **dict(self.template_tokens)}
            return chat_template.render(self.chat_template, values)
        except (ValueError, TypeError) as error:
            raise ValueError(f"the chat template refuses this conversation: {error}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids without control tokens; bytes that are no UTF-8 become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def stream(self) -> Stream:
        """A fresh incremental decoder: its pieces, put together, are `decode` of all ids."""
        return Stream(self)

    @classmethod
    def from_directory(cls, folder: Path) -> Tokenizer:
        """Read `tokenizer.json` and the files beside it that Hugging Face checkpoints have.

        Raises:
          ValueError: no `tokenizer.json`, or a damaged file.
        """
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ValueError(
                f"{folder} has no tokenizer.json: save it there with transformers' AutoTokenizer(...).save_pretrained"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises the bare class
            raise ValueError(f"{path} is no readable tokenizer ({error}): fetch it again") from error
        backend.no_padding()
        backend.no_truncation()
        config = read_json(folder / "tokenizer_config.json")
        legacy = read_json(folder / "special_tokens_map.json")
        named = {key: _content(value) for key, value in (legacy | config).items() if key.endswith("_token")}
        named = {key: value for key, value in named.items() if isinstance(value, str)}
        bos_id = backend.token_to_id(named["bos_token"]) if "bos_token" in named else None
        start = backend.encode("").ids[:1]
        eos = read_json(folder / "generation_config.json").get("eos_token_id")
        eos = read_json(folder / "config.json").get("eos_token_id") if eos is None else eos
        if eos is None and "eos_token" in named:
            eos = backend.token_to_id(named["eos_token"])
        return cls(
            backend=backend,
            bos_id=bos_id,
            add_bos=bool(config.get("add_bos_token", bos_id is not None and start == [bos_id])),
            declared_end_ids=end_ids(eos, f"eos_token_id of {folder}"),
            chat_template=_template(folder, config),
            template_tokens=tuple(sorted(named.items())),
        )

    def save(self, folder: Path) -> None:
        """Write what `from_directory` reads."""
        self.backend.save(str(folder / "tokenizer.json"))
        config = dict(self.template_tokens) | {"add_bos_token": self.add_bos, "chat_template": self.chat_template}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(self.declared_end_ids)}))


def end_ids(value: Any, where: str) -> tuple[int, ...]:
    """Ids that end a text, from a description that has none, one, or a list of them.

    Raises:
      ValueError: anything else.
    """
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(one) is int and 0 <= one < 2**31 for one in ids):
        raise ValueError(f"{where} is {value!r:.40}: must be a token id, or a list of ids")
    return tuple(ids)


class Stream:
    """Turns ids into text as they come, never half a character.

    New text is `decode(last shown token + new ones)` without the former's: the last shown token keeps
    sentencepiece's space rule for the beginning of a text from applying in its middle.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.byte_level = isinstance(tokenizer.backend.decoder, tokenizers.decoders.ByteLevel)
        self.shown: list[int] = []
        self.held: list[int] = []

    def push(self, token: int) -> str:
        """Text that is certain after this token; often the token's own, sometimes nothing yet."""
        text = None if token in self.tokenizer.special_ids else self.tokenizer.backend.id_to_token(token)
        if text is None:
            return ""
        if self.byte_level:  # the bytes so far may end within a character
            self.held.append(token)
            return "" if self._new_text().endswith("\ufffd") else self.flush()
        # sentencepiece decodes a run of byte tokens as one: valid or replaced as a whole, so it is held until it ends
        byte = len(text) == 6 and text.startswith("<0x")
        before = self.flush() if self.held and not byte else ""
        self.held.append(token)
        return before if byte else before + self.flush()

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        text = self._new_text()
        if self.held:
            self.shown, self.held = self.held[-1:], []
        return text

    def _new_text(self) -> str:
        return self.tokenizer.decode(self.shown + self.held)[len(self.tokenizer.decode(self.shown)) :]


def same_vocabulary(drafter: Tokenizer, target: Tokenizer) -> None:
    """Check that an id means the same to both. Sizes of embeddings are no matter: padding has no tokens.

    Raises:
      ValueError: naming the first difference.
    """
    fix = "use a drafter trained for this tokenizer"
    if drafter.vocab_size != target.vocab_size:
        raise ValueError(f"draft vocabulary {drafter.vocab_size} ≠ target vocabulary {target.vocab_size}: {fix}")
    for token, index in sorted(target.vocab.items(), key=lambda item: item[1]):
        if drafter.vocab.get(token) != index:
            theirs = drafter.backend.id_to_token(index)
            raise ValueError(f"id {index} is {theirs!r} to the drafter and {token!r} to the target: {fix}")
    if drafter.bos_id != target.bos_id:
        raise ValueError(f"bos id {drafter.bos_id} of the drafter ≠ {target.bos_id} of the target: {fix}")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file.

    Raises:
      ValueError: the file holds no JSON object.
    """
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}): fetch it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {type(value).__name__}, not a JSON object: fetch it again")
    return value


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"chat_template of {folder} is no text: {template!r:.60}")
    return template
