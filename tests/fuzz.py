"""Damaged files and nonsense on every way in: each ends in an answer or in one of the errors that become one line.

    python tests/fuzz.py --inputs 20000 --seed 1

An input is a file of a valid subject, one mutation of it, and what a command would do with it first. Seeded; what it
finds is printed with the seed of the input, `--only SEED` repeats it.
"""

import argparse
import collections
import copy
import dataclasses
import json
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import gguf
import jax
import numpy as np
from fixtures_cli import PROMPTS, byte_tokenizer
from fixtures_weights import byte_level_metadata, write_gguf
from safetensors.numpy import save_file

from specjax import evaluate, plugins, testing, weights
from specjax.evaluate import prompts, under_load
from specjax.evaluate.comparison import Comparison
from specjax.evaluate.run_folder import RunFolder, read_run
from specjax.evaluate.store import StoreError
from specjax.language_model import LanguageModel

ANSWERS = (ValueError, OSError, RuntimeError, OverflowError, StoreError)  # as `specjax.cli.errors.refusing` has them
SECONDS = 10
JUNK = (
    None, True, False, -1, 0, 1, 3, 1.5, -0.0, 1e308, float("inf"), float("nan"), 2**30, 2**31, 2**63, -(2**63), 2**70,
    "", "x", "\u2028", "\x1b[2J", "../..", "/etc/passwd", "default", "9" * 5000, [], [[]], [None], [1, "a"], {},
    {"a": {}}, [0] * 1000, ["full_attention", "sliding_attention"],
)  # fmt: skip


class Hang(BaseException):
    """An input took longer than any answer may."""


def places(value, path=()):
    """Every place of a JSON value, the outermost first."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:50]) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed_json(value, rng):
    """A deep copy with one to three places replaced, removed or doubled."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        path = rng.choice(list(places(value)))
        if not path:
            if rng.random() < 0.05:
                return copy.deepcopy(rng.choice(JUNK))
            continue
        inner = value
        for key in path[:-1]:
            inner = inner[key]
        kind = rng.random()
        if kind < 0.7:
            inner[path[-1]] = copy.deepcopy(rng.choice(JUNK))
        elif kind < 0.9:
            del inner[path[-1]]
        elif isinstance(inner, list):
            inner.append(copy.deepcopy(inner[path[-1]]))
        else:
            inner[str(rng.choice(JUNK))] = inner[path[-1]]
    return value


def changed_bytes(content, rng):
    """Flipped, cut, overwritten, inserted, or nested without end."""
    content = bytearray(content)
    at = rng.randrange(min(len(content), 1 << rng.randint(3, 20)) or 1)
    kind = rng.randrange(6)
    if kind == 0 and content:
        content[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del content[at:]
    elif kind == 2:
        value = rng.choice((b"\xff" * 8, b"\0" * 8, (2**40).to_bytes(8, "little"), b"\x80\x81", rng.randbytes(16)))
        content[at : at + len(value)] = value
    elif kind == 3:
        content[at:at] = rng.randbytes(rng.randint(1, 40))
    elif kind == 4:
        del content[at : at + rng.randint(1, 64)]
    else:
        content[at:at] = rng.choice((b"[" * 5000, b'{"a":' * 5000, b"\n", b"\0", b"\xef\xbb\xbf", b"NaN"))
    return bytes(content)


def changed_file(path, rng):
    """A mutation that suits a file: of its values where it is JSON, or of its bytes."""
    content = path.read_bytes()
    if path.suffix in (".json", ".jsonl") and rng.random() < 0.75:
        lines = content.decode().splitlines() if path.suffix == ".jsonl" else [content.decode()]
        number = rng.randrange(len(lines))
        lines[number] = json.dumps(changed_json(json.loads(lines[number]), rng))
        return "\n".join(lines).encode() + b"\n"
    return changed_bytes(content, rng)


def open_weights(path):
    """What every command does with a checkpoint."""
    found = weights.open_checkpoint(str(path), progress=False)
    assert found.config.vocab_size > 0
    tokenizer = found.tokenizer()
    assert all((found.files, found.shapes(), tokenizer.vocab))
    tokenizer.chat("hello")
    jax.block_until_ready(found.load())


def open_description(path):
    """What `memory` and `plan` do with one."""
    jax.eval_shape(weights.open_checkpoint(str(path), progress=False).model.init, jax.random.key(0))


class Subjects:
    """Valid inputs of every format in a folder, and what is done with each."""

    def __init__(self, root):
        self.root = root
        model, params = testing.tiny_model(vocab_size=259, num_layers=2)
        tokenizer = byte_tokenizer()
        self.target = LanguageModel.of(model, params, tokenizer=tokenizer)
        self._huggingface(model.config, params)
        weights.save(root / "native", model.config, params, tokenizer, format="safetensors")
        self._gguf()
        drafter = plugins.load_drafter("external", keep_layers=1)
        own = drafter.init_params(jax.random.key(7), model, params)
        trained = {"config": drafter.model(model).config, "tokenizer": tokenizer, "provenance": {"steps": 1}}
        weights.save_drafter(root / "trained", drafter, own, target=self.target.fingerprint, **trained)
        (root / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
        self.comparison = Comparison(self.target, ["ngram"], prompts=str(root / "prompts.jsonl"), max_new_tokens=6)
        evaluate.compare(self.comparison, root / "run", progress=None)
        self.manifest = json.loads((root / "run" / "manifest.json").read_text())
        self.kinds = {
            "huggingface": (6, root / "huggingface", open_weights),
            "config": (6, root / "huggingface" / "config.json", open_description),
            "native": (3, root / "native", open_weights),
            "gguf": (6, root / "model.gguf", open_weights),
            "trained": (2, root / "trained", lambda path: plugins.load_drafter(str(path))),
            "run": (4, root / "run", self.open_run),
            "load": (1, root / "run", lambda path: repr(under_load.diagnose(path))),
            "prompts": (2, root / "prompts.jsonl", lambda path: prompts.select(prompts.load(str(path)), limit=2)),
        }

    def _huggingface(self, config, params):
        folder = self.root / "huggingface"
        folder.mkdir()
        sizes = {
            "model_type": "llama", "vocab_size": 259, "hidden_size": config.hidden_size, "hidden_act": "silu",
            "intermediate_size": config.intermediate_size, "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
            "eos_token_id": [258, 256], "tie_word_embeddings": True, "rope_theta": 1e4, "torch_dtype": "float32",
            "attention_bias": False,
            "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                             "original_max_position_embeddings": 64},
            "sliding_window": None, "use_sliding_window": False, "layer_types": ["full_attention"] * config.num_layers,
            "quantization_config": None,
        }  # fmt: skip
        flat = {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
                for path, leaf in jax.tree.flatten_with_path(params)[0]}  # fmt: skip
        save_file({f"model.{name}": value for name, value in flat.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(sizes))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258], "temperature": 0.7}))
        tokenizer = byte_tokenizer()
        (folder / "tokenizer.json").write_text(tokenizer.backend.to_str())
        described = {"chat_template": tokenizer.chat_template, "eos_token": "<|im_end|>", "bos_token": None}
        (folder / "tokenizer_config.json").write_text(json.dumps(described))
        shards = {"weight_map": {f"model.{name}": "model.safetensors" for name in flat}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(shards))

    def _gguf(self):
        metadata = byte_level_metadata("smollm")
        vocab = len(dict(metadata)["tokenizer.ggml.tokens"])
        model, params = testing.tiny_model(vocab_size=vocab, num_layers=1)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
        tensors = {}
        for path, leaf in jax.tree.flatten_with_path(params)[0]:
            name = "model." + jax.tree_util.keystr(path, simple=True, separator=".")
            tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = (np.asarray(leaf), "F32")
        write_gguf(self.root / "model.gguf", model.config, tensors, metadata=metadata)

    def open_run(self, path):
        """Read it as `memory --acceptance` does, and go on with it as `compare` does."""
        try:
            read_run(path)
        finally:
            RunFolder.open(path, self.manifest).close()


def specification(rng):
    """A drafter or rule as somebody might type it."""
    parts = ("ngram", "fp8", "external", "early-exit", "none", "token", "lenient", "typical", "./x.py", "~nosuch/x", "",
             ":", "=", ",", "num_speculative_tokens", "prompt_lookup_max", "kv", "lenience", "-1", "0", "1e9", "nan",
             "9" * 30, "true", "\0", "\x1b[1m", "/", "..", "x" * 5000, "é", "checkpoint", "exit_layer")  # fmt: skip
    return "".join(rng.choice(parts) for _ in range(rng.randint(1, 6)))


@dataclasses.dataclass
class Findings:
    """What a run of the fuzzer saw."""

    outcomes: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    faults: list[str] = dataclasses.field(default_factory=list)
    slowest: float = 0.0
    grown_bytes: int = 0


def _alarm(signum, frame):
    raise Hang(f"more than {SECONDS} s")


def try_one(subjects, seed, findings):
    """One input, by its seed."""
    rng = random.Random(seed)
    names = list(subjects.kinds)
    kind = rng.choices([*names, "specification"], [subjects.kinds[name][0] for name in names] + [2])[0]
    begin, place, restore = time.perf_counter(), "", lambda: None
    if kind == "specification":
        place = specification(rng)
        load = rng.choice((plugins.load_drafter, plugins.load_rule))
        action = lambda: load(place)  # noqa: E731
    else:
        _, path, open_it = subjects.kinds[kind]
        files = [path] if path.is_file() else sorted(f for f in path.rglob("*.*") if f.suffix not in (".png", ".lock"))
        file = rng.choice(files)
        content = file.read_bytes()
        file.write_bytes(changed_file(file, rng))
        place, action, restore = file.name, lambda: open_it(path), lambda: file.write_bytes(content)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        action()
        findings.outcomes["accepted"] += 1
    except ANSWERS as error:
        findings.outcomes["refused"] += 1
        if not str(error).strip():
            findings.faults.append(f"seed {seed}, {kind} {place!r:.60}: {type(error).__name__} without a word")
    except (Hang, Exception) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        findings.faults.append(f"seed {seed}, {kind} {place!r:.60}: {type(error).__name__}: {error!s:.100} ({where})")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        restore()
    findings.slowest = max(findings.slowest, time.perf_counter() - begin)


def fuzz(inputs, seed, tell=lambda done, findings: None, only=None):
    """Try many."""
    findings = Findings()
    previous = signal.signal(signal.SIGALRM, _alarm)
    try:
        with tempfile.TemporaryDirectory() as root:
            subjects = Subjects(Path(root))
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for number in range(inputs) if only is None else [only - seed]:
                try_one(subjects, seed + number, findings)
                if number % 500 == 499:
                    jax.clear_caches()
                    tell(number + 1, findings)
            findings.grown_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    finally:
        signal.signal(signal.SIGALRM, previous)
    return findings


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="SEED", help="repeat one input")
    args = parser.parse_args()
    begin = time.perf_counter()

    def tell(done, findings):
        print(f"{done} inputs, {time.perf_counter() - begin:.0f} s: {dict(findings.outcomes)}", file=sys.stderr)

    findings = fuzz(args.inputs, args.seed, tell, args.only)
    print(*findings.faults, sep="\n")
    print(
        f"{args.inputs} inputs from seed {args.seed}: {dict(findings.outcomes)}, {len(findings.faults)} faults, "
        f"slowest {findings.slowest:.1f} s, {findings.grown_bytes >> 20} MiB of growth, "
        f"{time.perf_counter() - begin:.0f} s in all"
    )
    return bool(findings.faults)


if __name__ == "__main__":
    sys.exit(main())
