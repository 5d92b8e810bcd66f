import random

import numpy as np
import pytest
import tokenizers
from fixtures_weights import PROMPTS, STRINGS, byte_level_metadata, sentencepiece_vocabulary, smollm2, write_gguf
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from specjax.model import ModelConfig
from specjax.text import Tokenizer, same_vocabulary
from specjax.weights import gguf_vocabulary

__all__ = ["smollm2"]

TEMPLATE = (
    "{% for m in messages %}"
    "{% if loop.first and m.role != 'system' %}<|im_start|>system\ndefault<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level(pre="qwen2", **more):
    return gguf_vocabulary.build(dict(byte_level_metadata(pre, **more)))


def sentencepiece(**more):
    tokens, scores, types = sentencepiece_vocabulary()
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | more


def pieces(tokenizer, ids):
    stream = tokenizer.stream()
    return [stream.push(token) for token in ids] + [stream.flush()]


def transformers_from_gguf(folder, metadata):
    config = ModelConfig(8, 32, 32, 1, 1, 1, 32, 64)
    write_gguf(
        folder / "x.gguf", config, {"token_embd.weight": (np.zeros((8, 32), np.float32), "F32")}, metadata=metadata
    )
    return AutoTokenizer.from_pretrained(folder, gguf_file="x.gguf")


@pytest.fixture(scope="session")
def smollm2_transformers(smollm2):
    file = smollm2.files[0]
    if file.suffix != ".gguf":
        return AutoTokenizer.from_pretrained(file.parent)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # transformers builds a GPT-2 tokenizer here; SmolLM2's own tokenizer.json cuts out single digits first
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def test_smollm2_encodes_as_transformers_does(smollm2, smollm2_transformers):
    ours = smollm2.tokenizer()
    for text in PROMPTS + STRINGS:
        assert ours.encode(text) == smollm2_transformers(text)["input_ids"], text
        assert ours.decode(ours.encode(text)) == smollm2_transformers.decode(
            ours.encode(text), skip_special_tokens=True
        )


def test_smollm2_chats_as_transformers_does(smollm2, smollm2_transformers):
    ours = smollm2.tokenizer()
    for text in PROMPTS[::4] + STRINGS:
        for system in (None, "Answer briefly."):
            messages = [{"role": "user", "content": text}]
            if system:
                messages.insert(0, {"role": "system", "content": system})
            theirs = smollm2_transformers.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            assert ours.chat(text, system) == theirs
            assert ours.chat(messages) == theirs


def test_smollm2_ends_where_its_chat_ends(smollm2):
    tokenizer = smollm2.tokenizer()
    assert tokenizer.vocab_size == 49_152
    assert tokenizer.vocab["<|im_end|>"] in tokenizer.end_ids
    assert "named SmolLM" in tokenizer.render("hi")  # the template's own system prompt


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-2"])
def test_byte_level_vocabularies_cut_text_as_transformers_does(tmp_path, pre):
    ours, theirs = byte_level(pre), transformers_from_gguf(tmp_path, byte_level_metadata(pre))
    for text in STRINGS + PROMPTS[::10]:
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        if pre == "qwen2":  # Qwen2's own tokenizer.json composes characters; transformers' builder leaves that out
            import unicodedata

            expected = theirs(unicodedata.normalize("NFC", text), add_special_tokens=False)["input_ids"]
        assert ours.encode(text)[ours.add_bos :] == expected, text


def test_smollm_cuts_out_single_digits_before_words():
    ours = byte_level("smollm").backend.pre_tokenizer
    assert [piece for piece, _ in ours.pre_tokenize_str("in 1234\n\n5 cats")] == [
        "in",
        "Ġ",
        "1",
        "2",
        "3",
        "4",
        "ĊĊ",
        "5",
        "Ġcats",
    ]


def test_sentencepiece_vocabularies_encode_as_transformers_does(tmp_path):
    ours, theirs = gguf_vocabulary.build(sentencepiece()), transformers_from_gguf(tmp_path, sentencepiece().items())
    for text in STRINGS + PROMPTS[::10]:
        assert ours.encode(text) == [1, *theirs(text, add_special_tokens=False)["input_ids"]], text
        assert ours.decode(ours.encode(text)) == theirs.decode(ours.encode(text), skip_special_tokens=True), text


@pytest.mark.parametrize("make", [byte_level, lambda: gguf_vocabulary.build(sentencepiece())])
def test_streamed_pieces_add_up_to_the_decoded_whole(make):
    tokenizer, rng = make(), random.Random(0)
    texts = [tokenizer.encode(text) for text in STRINGS]
    noise = [[rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(12))] for _ in range(1000)]
    byte_ids = [tokenizer.backend.token_to_id(t) for t in tokenizer.vocab if len(t) == 1 or t.startswith("<0x")]
    invalid = [[rng.choice(byte_ids) for _ in range(rng.randrange(12))] for _ in range(1000)]
    for ids in texts + noise + invalid:
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids), ids


@pytest.mark.parametrize("make", [byte_level, lambda: gguf_vocabulary.build(sentencepiece())])
def test_streaming_never_prints_half_a_character(make):
    tokenizer, text = make(), "日本 😀👩‍👩‍👧 naïve — Ω"
    ids = tokenizer.encode(text)
    assert len(ids) > len(text)  # characters are cut into bytes
    assert "\ufffd" not in "".join(pieces(tokenizer, ids)[:-1])
    cut = [piece for piece in pieces(tokenizer, ids[:-1])]
    assert "\ufffd" not in "".join(cut[:-1])


def test_a_saved_tokenizer_gives_the_same_ids(tmp_path):
    for tokenizer in (byte_level(chat_template=TEMPLATE), gguf_vocabulary.build(sentencepiece())):
        tokenizer.save(tmp_path)
        again = Tokenizer.from_directory(tmp_path)
        assert [again.encode(text) for text in STRINGS] == [tokenizer.encode(text) for text in STRINGS]
        assert (again.end_ids, again.bos_id, again.vocab_size) == (
            tokenizer.end_ids,
            tokenizer.bos_id,
            tokenizer.vocab_size,
        )
        assert again.template_tokens == tokenizer.template_tokens
        if tokenizer.chat_template:
            assert again.chat("hi") == tokenizer.chat("hi")


def test_bos_follows_the_tokenizer_file_unless_its_config_says_otherwise(tmp_path):
    plain = byte_level()
    plain.save(tmp_path)
    bos = plain.vocab["<|endoftext|>"]
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"bos_token": {"content": "<|endoftext|>"}}')
    assert Tokenizer.from_directory(tmp_path).encode("Hello") == [bos, *plain.encode("Hello")]
    config.write_text('{"bos_token": "<|endoftext|>", "add_bos_token": false}')
    assert Tokenizer.from_directory(tmp_path).encode("Hello") == plain.encode("Hello")


def test_end_ids_come_from_lists_and_from_known_turn_ends(tmp_path):
    tokenizer = byte_level()
    tokenizer.save(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    ends = Tokenizer.from_directory(tmp_path).end_ids
    assert ends == (3, 5, tokenizer.vocab["<|endoftext|>"], tokenizer.vocab["<|im_end|>"])


def test_llama3_vocabularies_begin_with_bos_and_keep_whole_words():
    tokenizer = byte_level("llama-bpe")
    assert tokenizer.encode("Hello")[0] == tokenizer.bos_id
    assert byte_level("llama-bpe", **{"ggml.add_bos_token": False}).encode("Hello") == tokenizer.encode("Hello")[1:]


def test_a_chat_keeps_the_templates_default_system_prompt_until_one_is_given():
    tokenizer = byte_level(chat_template=TEMPLATE)
    assert tokenizer.render("hi").startswith("<|im_start|>system\ndefault")
    assert tokenizer.render("hi", system="mine").startswith("<|im_start|>system\nmine")
    assert tokenizer.decode(tokenizer.chat("hi")) == "system\ndefault\nuser\nhi\nassistant\n"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "refuses this conversation: roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "refuses this conversation"),  # the sandbox
        ("{% for %}", "refuses this conversation"),
        ("{{ messages[0]['content'] + 1 }}", "refuses this conversation"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 1 s or 512 MiB"),
        ("{{ 'a' * 5000000000 }}", "more than 1 s or 512 MiB"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "maximum recursion"),
    ],
)
def test_a_chat_that_cannot_be_rendered_says_why(template, message):
    more = {} if template is None else {"chat_template": template}
    with pytest.raises(ValueError, match=message):
        byte_level(**more).chat("hi")
    assert byte_level(chat_template="{{ messages[0].content }}").render("the next one") == "the next one"


def test_half_a_character_is_refused():
    with pytest.raises(ValueError, match="half a character at place 3"):
        byte_level().encode("caf\udcff")


def test_a_date_in_a_template_does_not_change_from_day_to_day():
    assert byte_level(chat_template="{{ strftime_now('%d %b %Y') }}").render("hi") == "26 Jul 2024"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "deepseek-v9"}, "pre-tokenizer 'deepseek-v9' is not known"),
        ({"tokenizer.ggml.model": "bert"}, "kind 'bert'"),
        ({"tokenizer.ggml.tokens": []}, "kind 'gpt2'"),
    ],
)
def test_an_unknown_vocabulary_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        gguf_vocabulary.build(dict(byte_level_metadata("qwen2")) | change)


def test_damaged_tokenizer_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    byte_level().save(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        whole = (tmp_path / name).read_text()
        (tmp_path / name).write_text(whole[: len(whole) // 2])
        with pytest.raises(ValueError, match=rf"{name} is no"):
            Tokenizer.from_directory(tmp_path)
        (tmp_path / name).write_text(whole)


def test_padding_of_the_vocabulary_is_no_difference():
    metadata = dict(byte_level_metadata("qwen2"))
    metadata["tokenizer.ggml.tokens"] = metadata["tokenizer.ggml.tokens"] + [f"[PAD{i}]" for i in range(7)]
    metadata["tokenizer.ggml.token_type"] = metadata["tokenizer.ggml.token_type"] + [5] * 7
    padded = gguf_vocabulary.build(metadata)
    assert padded.vocab_size == byte_level().vocab_size
    same_vocabulary(padded, byte_level())


def test_the_first_difference_of_two_vocabularies_is_named():
    metadata = dict(byte_level_metadata("qwen2"))
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    target = gguf_vocabulary.build(metadata)
    longer = metadata | {"tokenizer.ggml.tokens": [*tokens, "<x>"], "tokenizer.ggml.token_type": [*types, 3]}
    with pytest.raises(ValueError, match=f"draft vocabulary {len(tokens) + 1} ≠ target vocabulary {len(tokens)}"):
        same_vocabulary(gguf_vocabulary.build(longer), target)
    swapped = [*tokens[:-2], tokens[-1], tokens[-2]]
    with pytest.raises(ValueError, match=rf"id {len(tokens) - 2} is '<think>' to the drafter"):
        same_vocabulary(gguf_vocabulary.build(metadata | {"tokenizer.ggml.tokens": swapped}), target)
    with pytest.raises(ValueError, match="bos id 5 of the drafter"):
        same_vocabulary(gguf_vocabulary.build(metadata | {"tokenizer.ggml.bos_token_id": 5}), target)
