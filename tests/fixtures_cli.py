"""A whole checkpoint small enough for the command line's tests, with a tokenizer of bytes."""

import json

import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers

from specjax import testing, weights
from specjax.text import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROMPTS = [
    {"question_id": 81, "category": "writing", "turns": ["The sea, the sea, the sea.", "And now again."]},
    {"question_id": 82, "category": "writing", "turns": ["Copy: a b a b a b a b"]},
    {"question_id": 101, "category": "math", "turns": ["What is 2 + 2?"]},
]


def byte_tokenizer():
    """One token a byte, and the three of a chat."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return Tokenizer(backend, declared_end_ids=(258,), chat_template=TEMPLATE)


@pytest.fixture(scope="session", name="checkpoint")
def tiny_checkpoint(tmp_path_factory):
    """Path of a tiny target with a context of 256."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    model, params = testing.tiny_model(vocab_size=259, num_layers=3)
    weights.save(folder, model.config, params, byte_tokenizer())
    return folder


@pytest.fixture(scope="session", name="questions")
def question_file(tmp_path_factory):
    """A file of three prompts of two kinds, as Spec-Bench writes them."""
    path = tmp_path_factory.mktemp("prompts") / "question.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return path
