"""Kills and interrupts at random moments: what was finished stays, and the summary in the end is the same.

    python tests/kills.py --kills 50 --interrupts 50              of `compare` with five drafters
    python tests/kills.py --each-command 15                       an interrupt of every other command, and of compare

Every process is one of the real command. Seeded, but moments depend on the machine; what is found is printed.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from fixtures_cli import PROMPTS, byte_tokenizer

from specjax import testing, weights

DRAFTERS = ("ngram", "early-exit:exit_layer=1", "external:keep_layers=2", "fp8", "ngram:num_speculative_tokens=7")
FIGURES = (
    "drafter", "rounds", "emitted", "drafted", "tested", "accepted", "cut_rounds", "acceptance_length", "exact",
    "checked", "fault", "greedy_equal", "added_bytes", "peak_bytes", "compiler_bytes", "temp_bytes",
)  # fmt: skip
HEARD_S = 2.5  # two seconds, and half of one for a machine that does more than this


@dataclass
class Found:
    """What became of the processes: how many ended how, after how long, and what was wrong."""

    signals: int = 0
    in_time: int = 0
    slowest_s: float = 0.0
    complete: int = 0
    faults: list[str] = field(default_factory=list)

    def add(self, fault: str):
        self.faults.append(fault)
        print(fault, flush=True)


@dataclass
class Subject:
    """A tiny target, prompts, and the commands on them."""

    folder: Path
    environment: dict[str, str]

    def compare(self, out):
        drafters = [part for drafter in DRAFTERS for part in ("--drafter", drafter)]
        return ["compare", "--target", self.folder / "tiny", "--prompts", self.folder / "question.jsonl", *drafters,
                "--max-new-tokens", "24", "--batch-size", "1", "--out", out]  # fmt: skip

    def others(self, run):
        target = ["--target", self.folder / "tiny"]
        return {
            "generate": ["generate", *target, "--drafter", "ngram", "--max-new-tokens", "150", "a b a b"],
            "memory": ["memory", "--target", "llama-3.1-8b", "--device", "h100"],
            "plan": ["plan", "--target", "llama-3.1-8b", "--device", "h100"],
            "load": ["load", run],
            "exactness": ["exactness"],
            "drafters": ["drafters"],
        }

    def start(self, arguments):
        command = [Path(sys.executable).with_name("specjax"), *map(str, arguments)]
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def run(self, arguments):
        """Run a command that nobody disturbs; returns its seconds."""
        begin = time.monotonic()
        self.start(arguments).communicate()
        return time.monotonic() - begin

    def reference(self):
        """The folder of a `compare` that nobody disturbed, made once."""
        out = self.folder / "reference"
        if not (out / "summary.json").exists():
            self.run(self.compare(out))
        if not (out / "summary.json").exists():
            raise SystemExit(f"{out}: a run that nobody disturbed wrote no summary: there is nothing to compare with")
        return out


def make_subject(folder, prompts=8):
    """Write the target and the prompts; compilations are kept, so that runs are short and moments are anywhere."""
    model, params = testing.tiny_model(vocab_size=259, num_layers=3)
    weights.save(folder / "tiny", model.config, params, byte_tokenizer())
    written = [dict(PROMPTS[0], question_id=number, turns=[f"The sea {number}, the sea."]) for number in range(prompts)]
    (folder / "question.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in written))
    kept = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }  # fmt: skip
    return Subject(folder, os.environ | kept)


def figures(run):
    """What a summary says that isn't a time, and the tokens behind it; `None` where there is none."""
    if not (run / "summary.json").exists():
        return None
    summary = json.loads((run / "summary.json").read_text())
    rows = [{name: row[name] for name in FIGURES} for row in summary["rows"]]
    tokens = sorted(
        (record["drafter"], record["question_id"], record["tokens"])
        for record in map(json.loads, (run / "prompts.jsonl").read_text().splitlines())
    )
    return summary["complete"], rows, tokens


def whole_lines(run):
    path = run / "prompts.jsonl"
    written = path.read_bytes() if path.exists() else b""
    return written[: written.rfind(b"\n") + 1]


def end(subject, arguments, number, after_s, found):
    """Start a command, send it a signal in its time; True if it had come to its end before."""
    process = subject.start(arguments)
    try:
        _, said = process.communicate(timeout=after_s)
    except subprocess.TimeoutExpired:
        begin = time.monotonic()
        process.send_signal(number)
        try:
            _, said = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            _, said = process.communicate()
        took = time.monotonic() - begin
        found.signals += 1
        right = (-signal.SIGKILL,) if number == signal.SIGKILL else (130, -signal.SIGINT)  # before Python is there
        if process.returncode == 0 and took < 0.5:  # it was at its end
            return True
        found.in_time += took < HEARD_S
        found.slowest_s = max(found.slowest_s, took)
        if process.returncode not in right or "Traceback" in said or took >= HEARD_S:
            where = f"{arguments[0]}, signal {int(number)} after {after_s:.2f} s"
            found.add(f"{where}: exit {process.returncode} in {took:.2f} s: {said[-400:]}")
        return False
    if process.returncode != 0 or "Traceback" in said:
        found.add(f"{arguments[0]}: exit {process.returncode}: {said[-400:]}")
    return True


def attack_compare(subject, number, times, rng, found):
    """Send `times` signals to runs of `compare`, each run going on after each signal until it is complete."""
    wanted, last, run = figures(subject.reference()), found.signals + times, 0
    whole_s = subject.run(subject.compare(subject.folder / f"timed{int(number)}"))  # compiled, as those that follow
    while found.signals < last:
        run += 1
        out, kept, done = subject.folder / f"run{int(number)}-{run}", b"", False
        while not done and found.signals < last:
            done = end(subject, subject.compare(out), number, rng.uniform(0.1, whole_s), found)
            if not whole_lines(out).startswith(kept):
                found.add(f"{out.name}: a finished line was lost")
            kept = whole_lines(out)
        if not done:
            subject.run(subject.compare(out))
        ended = figures(out)
        found.complete += ended is not None
        if ended != wanted:
            found.add(f"{out.name}: its summary is another than that of a run that nobody disturbed")


def attack_each_command(subject, times, rng, found):
    """Interrupt every command `times` times at random moments of its own length."""
    for name, arguments in subject.others(subject.reference()).items():
        whole_s = subject.run(arguments)
        before = found.signals
        while found.signals < before + times:
            end(subject, arguments, signal.SIGINT, rng.uniform(0.1, 0.95 * whole_s), found)
        print(f"{name}: {times} interrupts within {whole_s:.1f} s, {len(found.faults)} faults so far", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--interrupts", type=int, default=0)
    parser.add_argument("--each-command", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        subject, rng, found = make_subject(Path(folder)), random.Random(args.seed), Found()
        attack_compare(subject, signal.SIGKILL, args.kills, rng, found)
        print(f"kills: {found}", flush=True)
        attack_compare(subject, signal.SIGINT, args.interrupts, rng, found)
        print(f"and interrupts: {found}", flush=True)
        if args.each_command:
            attack_each_command(subject, args.each_command, rng, found)
    print(found)
    return len(found.faults) > 0


if __name__ == "__main__":
    sys.exit(main())
