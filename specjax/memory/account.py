"""What a round of decoding holds in memory, from shapes alone: nothing is allocated, nothing is compiled.

Every component is found by tracing the functions that run (`jax.eval_shape`), so that a drafter of one's
own needs no code for its account. A strategy's bytes are compared with those of `none`, for the same
target, batch and capacity.

    bytes ▲                ┌──────────┐
          │   ┌────────┐   │ buffers  │   ┌────────┐   buffers live in one phase,
          │   │ buffers│   │          │   │        │   all else in every one: size
          │   ├────────┴───┴──────────┴───┴────────┤   for the highest column
          │   │ weights, KV, state                 │
          └───┴────────────────────────────────────┴─►
               draft        verify         commit
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax

from specjax import decode
from specjax.drafter import Nothing
from specjax.memory.buffers import PHASES, buffers
from specjax.memory.hardware import Device
from specjax.memory.round_trace import Weights, trace_round
from specjax.mesh import Layout
from specjax.types import Cache

LARGEST_BATCH = 2**24
GROUPS = ("weights", "kv", "state", "buffers")


@dataclass(frozen=True)
class Component:
    """Bytes with a name. `group` is one of `GROUPS`; `phases` tells when they are held."""

    name: str
    group: str
    bytes: int
    phases: tuple[str, ...] = PHASES


@dataclass(frozen=True, repr=False)
class Account:
    """A strategy's components on one device, and those of `none` at the same batch and capacity."""

    components: tuple[Component, ...]
    baseline: tuple[Component, ...]
    device: Device | None = None

    def phase_bytes(self, phase: str, group: str | None = None) -> int:
        """What is held at once in a phase."""
        return _held(self.components, phase, group)

    @property
    def peak_bytes(self) -> int:
        """What is held at once when a draft is verified."""
        return self.phase_bytes("verify")

    @property
    def peak_phase(self) -> str:
        """The phase that holds most: usually verification, but a drafter's own buffers may be larger."""
        return max(PHASES, key=lambda phase: (self.phase_bytes(phase), phase == "verify"))

    @property
    def needed_bytes(self) -> int:
        """What a device must have: the bytes of `peak_phase`."""
        return self.phase_bytes(self.peak_phase)

    @property
    def left_bytes(self) -> int | None:
        """What the device has beyond that, below zero where it does not fit; `None` without a device."""
        return None if self.device is None else self.device.limit_bytes - self.needed_bytes

    @property
    def added_bytes(self) -> dict[str, int]:
        """What the strategy needs beyond `none`, a group: in each, the phase that holds most counts."""
        return {
            group: max(_held(self.components, phase, group) for phase in PHASES)
            - max(_held(self.baseline, phase, group) for phase in PHASES)
            for group in GROUPS
        }

    def bytes(self, name: str) -> int:
        """One component's bytes; 0 where the strategy has none of that name."""
        return sum(component.bytes for component in self.components if component.name == name)

    def offloaded(self) -> Account:
        """The same with the drafter's weights in host memory: the device holds them while it drafts."""
        moved = (
            dataclasses.replace(part, phases=("draft",)) if part.name == "drafter weights" else part
            for part in self.components
        )
        return dataclasses.replace(self, components=tuple(moved))

    def _lines(self) -> list[tuple[str, str]]:
        lines = [(part.name, _shown(part.bytes)) for part in self.components if part.bytes]
        lines.append((f"held at once, in {self.peak_phase}", _shown(self.needed_bytes)))
        lines.append(("  of it added to none", _shown(sum(self.added_bytes.values()))))
        if self.device is not None and self.left_bytes is not None:
            lines.append((f"usable on {self.device.name}", _shown(self.device.limit_bytes)))
            lines.append(("  left" if self.left_bytes >= 0 else "  too much by", _shown(abs(self.left_bytes))))
        return lines

    def __repr__(self) -> str:
        lines = self._lines()
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:{width}}  {size:>12}" for name, size in lines)

    def _repr_html_(self) -> str:
        cells = (
            f"<tr><td>{html.escape(name)}</td><td style='text-align:right'>{size}</td></tr>"
            for name, size in self._lines()
        )
        return f"<table>{''.join(cells)}</table>"


def account(
    program: decode.Program,
    params: Weights,
    drafter_params: Weights,
    *,
    batch: int,
    capacity: int,
    cache_dtype: Any,
    layout: Layout = Layout(),  # noqa: B008  (frozen)
    backend: str | None = None,
    device: Device | None = None,
) -> Account:
    """The account of one strategy, of a program that is here; `specjax.memory.account_for` takes names.

    Args:
      params, drafter_params: arrays, or `jax.ShapeDtypeStruct`s of them. An array of the target that
        stands among the drafter's counts once, as the target's.
      batch: rows that are decoded together.
      capacity: cache slots a row: committed tokens and the speculative window.
      layout: how arrays are partitioned; bytes are those of one device.
      backend: `cpu`, `gpu` or `tpu`; this one's by default. A CPU keeps float32 copies of what it multiplies.
      device: what the account is compared with where it is shown.
    """
    _check(program, batch, capacity)
    sizes = {"batch": batch, "capacity": capacity, "cache_dtype": cache_dtype}
    backend = backend or jax.default_backend()
    plain = decode.Program(program.model, Nothing(), program.rule)
    baseline = components = tuple(_components(plain, params, (), sizes, layout, backend))
    if not isinstance(program.drafter, Nothing):
        components = tuple(_components(program, params, drafter_params, sizes, layout, backend))
    return Account(components, baseline, device)


def _components(
    program: decode.Program, params: Weights, drafter_params: Weights, sizes: Any, layout: Layout, backend: str
) -> Iterable[Component]:
    traced = trace_round(program, params, drafter_params, **sizes)
    shared = {id(leaf) for leaf in jax.tree.leaves(params)}
    own = jax.tree.map(lambda leaf: None if id(leaf) in shared else leaf, drafter_params)
    state, total = traced.state, layout.total
    cache_bytes = total("kv", state.cache)
    window_bytes = cache_bytes * traced.draft.tokens.shape[1] // sizes["capacity"]
    pieces = jax.tree.leaves(state.drafter, is_leaf=lambda node: isinstance(node, Cache))
    caches, others = ([piece for piece in pieces if isinstance(piece, Cache) is kind] for kind in (True, False))
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    loop = {name: part for name, part in fields.items() if name not in ("cache", "drafter")}
    yield Component("target weights", "weights", total("weights", params))
    yield Component("drafter weights", "weights", total("weights", own))
    yield Component("target KV, committed", "kv", cache_bytes - window_bytes)
    yield Component("target KV, speculative window", "kv", window_bytes)
    yield Component("drafter KV", "kv", total("kv", caches))
    yield Component("drafter state", "state", total("state", others))
    yield Component("tokens and counts", "state", total("state", loop))
    for buffer in buffers(traced, backend):
        size = 0 if buffer.array is None else buffer.count * layout.size(buffer.kind, (), buffer.array)
        yield Component(buffer.name, "buffers", size, buffer.phases)


def _held(components: Iterable[Component], phase: str, group: str | None = None) -> int:
    return sum(part.bytes for part in components if phase in part.phases and group in (None, part.group))


def _shown(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"


def _check(program: decode.Program, batch: int, capacity: int) -> None:
    context, window = program.model.context_length, program.drafter.num_speculative_tokens
    if not 1 <= batch <= LARGEST_BATCH:
        raise ValueError(f"batch={batch}: must be 1 to {LARGEST_BATCH}")
    if not 1 <= capacity <= context:
        raise ValueError(
            f"context of {capacity} tokens: must be 1 to {context}, the longest that the target was made for"
        )
    if window >= capacity:
        raise ValueError(f"num_speculative_tokens={window}: the window does not fit into {capacity} cache slots")
