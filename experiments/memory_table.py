"""Do shapes agree with the compilers? Each strategy's round, compiled ahead of time for TPUs and GPUs.

    python -m pip install -e '.[tpu-aot,cuda-aot]'
    python -m specjax.experiments.memory_table            # missing rows are compiled, one at a time
    python -m specjax.experiments.memory_table --limit 0  # only writes the table again

Rows go to `memory_table.jsonl` as they are done; `memory_table.md` is the table of them. Nothing is
allocated on a device: none is needed. A 70B round takes the compilers a minute or a few.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specjax.memory import hardware
from specjax.memory.ahead import compile_ahead
from specjax.memory.sharding import layout
from specjax.memory.strategies import Strategy

HERE = Path(__file__).parent
WINDOW = 5
DRAFTERS = ("none", "ngram", "early-exit", "fp8", "fp8:kv=own", "external:llama-3.1-8b", "external")
PLACES = (
    ("h100", "1", "llama-3.1-8b", 8, 4096),
    ("tpu-v5p", "2x2x2", "llama-3.1-70b", 16, 8192),
    ("tpu-v5e", "2x2", "llama-3.1-8b", 8, 4096),
    ("tpu-v6e", "2x2", "llama-3.1-8b", 8, 8192),
    ("tpu-v5p", "2x2x1", "llama-3.1-8b", 4, 131_072),
    ("tpu-v5e", "4x4", "llama-3.1-70b", 4, 2048),
    ("tpu-v6e", "2x4", "llama-3.1-70b", 4, 32_768),
)


def cells() -> Iterator[tuple[str, str, Strategy]]:
    """Every place with every drafter; a model does not draft for itself."""
    for device, mesh, target, batch, context in PLACES:
        for drafter in DRAFTERS:
            if drafter != f"external:{target}":
                yield device, mesh, Strategy(target, drafter, batch, context, WINDOW * (drafter != "none"))


def measure(device: str, mesh: str, strategy: Strategy) -> dict[str, Any]:
    """One row: bytes per device from shapes and from the compiler."""
    hardware_ = hardware.find(device)
    devices = hardware.chips(mesh) * hardware_.devices_per_chip
    account = strategy.account(layout(devices, strategy.model.config.num_kv_heads).size, hardware_.platform)
    found = compile_ahead(strategy, hardware_, mesh)
    return {
        "device": device,
        "mesh": mesh,
        **strategy.asdict(),
        "shapes_bytes": account.needed_bytes,
        "held_bytes": account.needed_bytes - account.phase_bytes(account.peak_phase, "buffers"),
        "compiler_bytes": found.figures.total_bytes,
        "argument_bytes": found.figures.argument_bytes,
        "temp_bytes": found.figures.temp_bytes,
        "alias_bytes": found.figures.alias_bytes,
        "refusal": found.refusal,
        "compile_s": round(found.compile_s, 1),
        "largest": found.largest,
    }


def main() -> None:
    """Compile what is missing, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=None, help="rows to compile at most")
    parser.add_argument("--device", default="", help="only this device")
    parser.add_argument("--drafter", default="", help="only this drafter")
    arguments = parser.parse_args()
    path = HERE / "memory_table.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {_key(row) for row in rows}
    for device, mesh, strategy in cells():
        key = _key({"device": device, "mesh": mesh, **strategy.asdict()})
        wanted = arguments.device in ("", device) and arguments.drafter in ("", strategy.drafter)
        if key in done or not wanted or arguments.limit == 0:
            continue
        rows.append(measure(device, mesh, strategy))
        with path.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        print(_line(rows[-1]), flush=True)
        arguments.limit = arguments.limit and arguments.limit - 1
    (HERE / "memory_table.md").write_text(table(rows))


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("device", "mesh", "target", "drafter", "batch", "context", "window"))


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    names = "device", "mesh", "target", "drafter", "batch", "context", "shapes GiB", "compiler GiB", "difference"
    head = [*names, "temporaries MiB", "of weights + KV", "compile s"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head), *map(_line, rows)]
    return "Bytes per device, written by `memory_table.py`.\n\n" + "\n".join(lines) + "\n"


def _line(row: dict[str, Any]) -> str:
    cells_ = [str(row[name]) for name in ("device", "mesh", "target", "drafter", "batch", "context")]
    cells_.append(f"{row['shapes_bytes'] / 2**30:.3f}")
    if row["compiler_bytes"] is None:
        cells_ += ["does not fit" if row["refusal"] else "unknown", "", "", ""]
    else:
        cells_ += [
            f"{row['compiler_bytes'] / 2**30:.3f}",
            f"{row['compiler_bytes'] / row['shapes_bytes'] - 1:+.2%}",
            f"{row['temp_bytes'] / 2**20:.0f}",
            f"{row['temp_bytes'] / row['held_bytes']:.2%}",
        ]
    return "| " + " | ".join([*cells_, f"{row['compile_s']:.0f}"]) + " |"


if __name__ == "__main__":
    main()
