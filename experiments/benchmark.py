"""Is specjax fast where it claims to be? Ratios within one run, on SmolLM2-135M in float32.

    python -m specjax.experiments.benchmark [--target smollm2-135m] [--out benchmark.json]

Three questions, each answered by a ratio of medians whose parts are measured in turn, so that a change
of the machine's speed meets both:

    decoding   tokens/s of `none` over tokens/s of greedy `transformers.generate` on the same weights
    round      a round inside the compiled loop over a bare forward pass of K + 1 tokens
    copying    tokens/s of `ngram` over `none` on code-editing prompts whose answers copy the prompt

A prompt is copy-heavy when at least 0.6 of the answer's 4-grams stand in the prompt. That is a property of
prompt and target, not of the drafter; 0.6 is where published comparisons see prompt lookup begin to win.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import Engine, LanguageModel, decode, load_target
from specjax.evaluate import prompts

COPY_OVERLAP = 0.6


class Loop:
    """Decodes one prompt again and again: seconds per round and per token of the compiled loop alone."""

    def __init__(self, engine: Engine, prompt: list[int], new_tokens: int, capacity: int):
        self.engine, self.prompt = engine, prompt
        self.options = {"max_new_tokens": new_tokens, "seed": 0, "capacity": capacity, "end_ids": ()}
        self.rounds = self.tokens = 0

    def __call__(self) -> float:
        """Run the loop; the time of the prefill is left out."""
        state = self.engine.start([self.prompt], **self.options)
        jax.block_until_ready(state.length)
        run = functools.partial(decode.run, self.engine.program, self.engine.params, self.engine.drafter_params, state)
        before = time.perf_counter()
        state = jax.block_until_ready(run())
        taken = time.perf_counter() - before
        generation = self.engine.results(state, [self.prompt])[0]
        self.rounds, self.tokens = len(generation.counts.emitted), int(generation.counts.emitted.sum())
        return taken


def against_transformers(target: LanguageModel, prompt: list[int], new_tokens: int, repeats: int) -> dict[str, float]:
    """Greedy tokens/s of both on the same weights and prompt, prefill left out of both."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    c = target.model.config
    config = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
        max_position_embeddings=c.context_length, rope_theta=c.rope_theta, rms_norm_eps=c.norm_eps,
        tie_word_embeddings=c.tied_embeddings,
    )  # fmt: skip
    peer = LlamaForCausalLM(config).eval()
    flat = {"model." + ".".join(map(str, path)): leaf for path, leaf in _flatten(target.params)}
    tensors = {name: torch.from_numpy(np.array(leaf)) for name, leaf in flat.items()}
    missing, unexpected = peer.load_state_dict(tensors, strict=False)
    if not set(missing) <= {"lm_head.weight"} or unexpected:
        raise RuntimeError(f"weights don't fit transformers' model: {missing}, {unexpected}")
    ids = torch.tensor([prompt])
    loop = Loop(Engine(target, "none"), prompt, new_tokens, capacity=256)

    def generate(count: int) -> float:
        before = time.perf_counter()
        with torch.no_grad():
            peer.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        return time.perf_counter() - before

    loop(), generate(2)
    ours, theirs = [], []
    for _ in range(repeats):
        ours.append(loop() / loop.tokens)
        theirs.append((generate(new_tokens) - generate(1)) / (new_tokens - 1))
    none, peers = 1 / statistics.median(ours), 1 / statistics.median(theirs)
    return {"none_tokens_per_s": none, "transformers_tokens_per_s": peers, "ratio": none / peers}


def _flatten(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    if not isinstance(tree, dict):
        return [(path, tree)]
    return [leaf for key, value in tree.items() for leaf in _flatten(value, (*path, key))]


def round_against_forward(
    target: LanguageModel, name: str, window: int, prompt: list[int], repeats: int
) -> dict[str, float]:
    """Seconds of a round in the loop, and of a bare forward pass of `window + 1` tokens on an equal cache."""
    spec = name if name == "none" else f"{name}:num_speculative_tokens={window}"
    model, params = target.model, target.params
    loop = Loop(Engine(target, spec), prompt, 32, capacity=256)

    @functools.partial(jax.jit, donate_argnums=1)
    def forward(params: Any, cache: Any, tokens: jax.Array, start: jax.Array) -> Any:
        out = model.forward(params, tokens, cache, start)
        return model.logits(params, out.hidden), out.cache

    cache = model.init_cache(1, 256, jnp.float32)
    tokens, start = jnp.ones((1, window + 1), jnp.int32), jnp.asarray([len(prompt)], jnp.int32)
    bare, rounds = [], []
    for repeat in range(repeats + 1):
        taken = loop() / loop.rounds
        passes = []
        for _ in range(8):
            before = time.perf_counter()
            logits, cache = forward(params, cache, tokens, start)
            jax.block_until_ready(logits)
            passes.append(time.perf_counter() - before)
        if repeat:  # the first one compiled
            rounds.append(taken)
            bare.append(statistics.median(passes))
    ratio = statistics.median(a / b for a, b in zip(rounds, bare, strict=True))
    return {"round_s": statistics.median(rounds), "forward_s": statistics.median(bare), "ratio": ratio}


def overlap(answer: list[int], prompt: list[int], n: int = 4) -> float:
    """Share of the answer's n-grams that stand in the prompt."""
    grams = [tuple(answer[i : i + n]) for i in range(len(answer) - n + 1)]
    known = {tuple(prompt[i : i + n]) for i in range(len(prompt) - n + 1)}
    return sum(gram in known for gram in grams) / max(1, len(grams))


def copying(target: LanguageModel, texts: list[list[int]], repeats: int) -> dict[str, Any]:
    """`ngram` against `none` over the prompts whose answers copy."""
    engines = {name: Engine(target, name) for name in ("none", "ngram")}
    options = {"max_new_tokens": 96, "capacity": 512, "seed": 0}
    chosen = []
    for prompt in texts:
        answer = engines["none"].generate([prompt], **options)[0].tokens
        if overlap(answer, prompt) >= COPY_OVERLAP:
            chosen.append(prompt)
    taken = {name: [] for name in engines}
    tokens = dict.fromkeys(engines, 0)
    for repeat in range(repeats + 1):
        for name, engine in engines.items():
            total, tokens[name] = 0.0, 0
            for prompt in chosen:
                loop = Loop(engine, prompt, 96, 512)
                loop.options["end_ids"] = target.end_ids
                total += loop()
                tokens[name] += loop.tokens
            if repeat:
                taken[name].append(total)
    ratios = [a / b for a, b in zip(taken["none"], taken["ngram"], strict=True)]
    assert tokens["none"] == tokens["ngram"], "greedy outputs differ"
    return {"prompts": len(chosen), "of": len(texts), "tokens": tokens["none"], "ratio": statistics.median(ratios)}


def main() -> None:
    """Measure, print a line as each figure is known, and write them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=Path("benchmark.json"))
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    target = load_target(arguments.target, dtype=jnp.float32)
    prompt = target.encode("Explain in three sentences why the sky is blue.")
    figures: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "rounds": {}}

    def say(name: str, figure: dict[str, Any]) -> None:
        print(f"{name:22s} ratio {figure['ratio']:.2f}   {figure}", flush=True)
        arguments.out.write_text(json.dumps(figures, indent=1))

    figures["decoding"] = against_transformers(target, prompt, 48, arguments.repeats)
    say("none / transformers", figures["decoding"])
    for name, window in (("none", 0), *(("ngram", k) for k in (1, 3, 7))):
        figure = round_against_forward(target, name, window, prompt, arguments.repeats)
        figures["rounds"][f"{name} K={window}"] = figure
        say(f"round / forward {name} {window}", figure)
    texts = [target.encode(p.text) for p in prompts.load().prompts if p.category == "code_editing"]
    texts = [ids for ids in texts if len(ids) + 96 <= 512]
    figures["copying"] = copying(target, texts, max(1, arguments.repeats // 2))
    say("ngram / none, copying", figures["copying"])


if __name__ == "__main__":
    sys.exit(main())
