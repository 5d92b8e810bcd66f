"""Do shapes agree with the compilers? Each strategy's round, compiled ahead of time for TPUs and GPUs.

    python -m pip install -e '.[tpu-aot,cuda-aot]'
    python -m specjax.experiments.memory_table            # missing rows are compiled, one at a time
    python -m specjax.experiments.memory_table --limit 0  # only writes the table again

Rows go to `memory_table.jsonl` as they are known; `memory_table.md` is the table of them. Nothing is
allocated on a device: none is needed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specjax.evaluate.store import Store
from specjax.memory import hardware
from specjax.memory.aot import compile_ahead
from specjax.memory.strategy import Strategy

HERE = Path(__file__).parent
WINDOW, SHOWN_BYTES = 5, 2**16
DRAFTERS = ("none", "ngram", "early-exit", "fp8", "fp8:kv=own", "external")
SMALL, LARGE = "llama-3.1-8b", "llama-3.1-70b"
ODD = "smollm2-135m"
"""Heads of 64 and a width of 576: a TPU pads both."""
SIZES = ((2048, 16), (16_384, 4), (131_072, 1))
"""Contexts, each with a batch."""
PLACES = (
    ("tpu-v5e", "2x2", SMALL, SIZES),
    ("tpu-v5e", "2x4", SMALL, SIZES),
    ("tpu-v5e", "4x4", LARGE, SIZES),
    ("tpu-v5e", "4x8", LARGE, SIZES),
    ("tpu-v5p", "1x1x1", SMALL, SIZES),
    ("tpu-v5p", "2x2x1", SMALL, SIZES),
    ("tpu-v5p", "2x2x1", LARGE, SIZES),
    ("tpu-v5p", "2x2x2", LARGE, SIZES),
    ("tpu-v6e", "2x2", SMALL, SIZES),
    ("tpu-v6e", "2x4", SMALL, SIZES),
    ("tpu-v6e", "2x4", LARGE, SIZES),
    ("tpu-v6e", "4x4", LARGE, SIZES),
    ("h100", "1", SMALL, SIZES),
    ("h100", "8", LARGE, SIZES[:2]),
    ("h200", "1", SMALL, SIZES[:1]),
    ("b200", "1", SMALL, SIZES[:1]),
    ("tpu-v4", "2x2x1", SMALL, SIZES[:1]),
    ("tpu-v7", "2x2x1", SMALL, SIZES[:1]),
    ("tpu-v5e", "1x1", ODD, SIZES[:1]),
)


def cells() -> Iterator[tuple[str, str, Strategy]]:
    """Every place with its sizes and drafters."""
    for device, mesh, target, sizes in PLACES:
        platform = hardware.find(device).platform
        for context, batch in sizes:
            for drafter in DRAFTERS:
                window = WINDOW * (drafter != "none")
                yield device, mesh, Strategy(target, drafter, batch, context, window, platform=platform)


def measure(name: str, mesh: str, strategy: Strategy) -> dict[str, Any]:
    """One row: bytes per device from shapes and from the compiler."""
    device, layout = hardware.place(name, mesh, 1, strategy.model.config)
    account = strategy.account(layout)
    found = compile_ahead(strategy, device, mesh)
    peak, figures = account.peak_phase, found.figures
    row = {
        "device": name,
        "mesh": mesh,
        **strategy.asdict(),
        "shapes_bytes": account.needed_bytes,
        "buffer_bytes": account.phase_bytes(peak, "buffers"),
        "weight_and_kv_bytes": account.phase_bytes(peak, "weights") + account.phase_bytes(peak, "kv"),
        "seconds": round(found.seconds, 1),
        "refusal": found.refusal,
    }
    if figures is None:
        return row | {"compiler_bytes": None}
    shown = [(name, size) for name, size in figures.temporaries if size >= SHOWN_BYTES]
    small = figures.temp_bytes - sum(size for _, size in shown)
    return row | {
        "compiler_bytes": figures.total_bytes,
        "argument_bytes": figures.argument_bytes,
        "temp_bytes": figures.temp_bytes,
        "on_chip_bytes": figures.on_chip_bytes,
        "temporaries": [*shown, (f"below {SHOWN_BYTES} bytes each", small)],
    }


def main() -> int:
    """Compile what is missing, and write the table; 1 if a compiler failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=None, help="rows to compile at most")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no row after that time")
    parser.add_argument("--device", default="", help="only this device")
    parser.add_argument("--target", default="", help="only this target")
    parser.add_argument("--readme", type=Path, default=Path("specjax/memory/README.md"), help="its summary, too")
    arguments, failed = parser.parse_args(), 0
    path = HERE / "memory_table.jsonl"
    wanted = {
        _key({"device": device, "mesh": mesh, **strategy.asdict()}): (device, mesh, strategy)
        for device, mesh, strategy in cells()
        if arguments.device in ("", device) and arguments.target in ("", strategy.target)
    }
    store = Store(path, _key)
    for key in itertools.islice(store.missing(wanted, arguments.seconds), arguments.limit):
        try:
            row = measure(*wanted[key])
        except RuntimeError as error:  # the other rows are worth having
            failed += 1
            print(f"{' '.join(map(str, key))}: {error}", file=sys.stderr, flush=True)
            continue
        store.append(row)
        print(_line(row), flush=True)
    rows = read(path)
    (HERE / "memory_table.md").write_text(table(rows))
    if arguments.readme.is_file() and BEGIN in arguments.readme.read_text():
        arguments.readme.write_text(into_readme(arguments.readme.read_text(), rows))
    return min(failed, 1)


def read(path: Path) -> list[dict[str, Any]]:
    """The rows that are done, in the order of `PLACES`."""
    order = [_key({"device": device, "mesh": mesh, **strategy.asdict()}) for device, mesh, strategy in cells()]
    return sorted(Store(path, _key).rows, key=lambda row: order.index(_key(row)))


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("device", "mesh", "target", "drafter", "batch", "context", "window"))


HEAD = (
    "device", "mesh", "target", "drafter", "batch", "context", "shapes GiB", "compiler GiB", "difference",
    "arguments' padding MiB", "temporaries MiB", "of them from shapes MiB", "beyond, of weights + KV", "seconds",
)  # fmt: skip
INTRODUCTION = """Bytes per device of the compiled, donated loop of rounds (propose, verify, commit; window 5,
bfloat16), from shapes and from the device's own compiler. Written by `memory_table.py`.

The difference is the padding of arguments to tiles, and temporaries beyond those that shapes name (probabilities,
logits, attention scores). A compiler's bytes are those that it assigned in HBM: a TPU's vector memory is not in them.
"Addresses" are tables of a tuple's parts, 16 KiB each on a TPU; `memory_table.jsonl` has all temporaries to 64 KiB.
"""
BEGIN, END = "<!-- memory: written by experiments/memory_table.py -->", "<!-- end of memory -->"


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown, and below them every row's largest temporaries."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD), *map(_line, rows)]
    parts = [INTRODUCTION, summary(rows), "", *lines, "", "## The largest temporaries", ""]
    return "\n".join([*parts, *(_named(row) for row in rows if row["compiler_bytes"])]) + "\n"


def into_readme(text: str, rows: list[dict[str, Any]]) -> str:
    """The README with the summary between its two marks made anew."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{summary(rows)}\n\n{END}{rest.partition(END)[2]}"


def summary(rows: list[dict[str, Any]]) -> str:
    """A line a group of rows, in Markdown."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in filter(lambda row: row["compiler_bytes"], rows):
        groups.setdefault(group(row), []).append(row)
    beyond_head = "temporaries beyond the named ones, of weights + KV, at most"
    lines = [
        f"| compiler | programs | furthest from the shapes | {beyond_head} | slowest, s |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, found in groups.items():
        furthest = max(found, key=lambda row: abs(difference(row)))
        where = ", ".join(str(furthest[part]) for part in ("device", "target", "drafter", "context"))
        lines.append(
            f"| {name} | {len(found)} | {difference(furthest):+.2%} ({where}) | {max(map(beyond, found)):.2%} "
            f"| {max(row['seconds'] for row in found):.0f} |"
        )
    return "\n".join(lines)


def group(row: dict[str, Any]) -> str:
    """The rows that are summed up together."""
    if row["target"] == ODD:
        return f"{ODD}, of odd widths, on a TPU"
    if row["device"] in ("tpu-v5e", "tpu-v5p", "tpu-v6e"):
        return "TPU v5e, v5p, v6e"
    return row["device"].replace("tpu-", "TPU ") if row["platform"] == "tpu" else "H100, H200, B200"


def difference(row: dict[str, Any]) -> float:
    """Of the compiler's bytes from those of the shapes, relative."""
    return row["compiler_bytes"] / row["shapes_bytes"] - 1


def beyond(row: dict[str, Any]) -> float:
    """Temporaries that no component names, as a share of weights and KV."""
    return max(0, row["temp_bytes"] - row["buffer_bytes"]) / row["weight_and_kv_bytes"]


def _line(row: dict[str, Any]) -> str:
    shown = [str(row[name]) for name in HEAD[:6]] + [f"{row['shapes_bytes'] / 2**30:.3f}"]
    if row["compiler_bytes"] is None:
        shown += ["unknown", *[""] * 5]
    else:
        padding = row["argument_bytes"] + row["buffer_bytes"] - row["shapes_bytes"]
        mebibytes = (f"{size / 2**20:.1f}" for size in (padding, row["temp_bytes"], row["buffer_bytes"]))
        fits = ", does not fit" if row["refusal"] else ""
        shown += [f"{row['compiler_bytes'] / 2**30:.3f}{fits}", f"{difference(row):+.2%}"]
        shown += [*mebibytes, f"{beyond(row):.2%}"]
    return "| " + " | ".join([*shown, f"{row['seconds']:.0f}"]) + " |"


def _named(row: dict[str, Any]) -> str:
    where = f"{row['device']} {row['mesh']}, {row['target']}, {row['drafter']}, {row['batch']} x {row['context']}"
    parts = (f"{size / 2**20:.1f} MiB `{name}`" for name, size in row["temporaries"][:4])
    return f"- {where}: " + ", ".join(parts)


if __name__ == "__main__":
    raise SystemExit(main())
