"""What the compiler of this backend gives the loop of rounds: its own figures, beside those from shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from specjax import decode
from specjax.memory.round_trace import Weights, state_shapes, structs

QUICK: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
"""On CPU, buffers are assigned before LLVM sees the program: the same figures in half of the time."""


@dataclass(frozen=True)
class Compiled:
    """`memory_analysis()` of the compiled, donated loop. `None` is unknown, never zero.

    The total is argument + output + temporaries - alias. `peak_memory_in_bytes` is not used: on CPU it
    leaves the temporaries out.
    """

    argument_bytes: int | None = None
    output_bytes: int | None = None
    temp_bytes: int | None = None
    alias_bytes: int | None = None

    @property
    def total_bytes(self) -> int | None:
        """What one device holds while the loop runs."""
        parts = (self.argument_bytes, self.output_bytes, self.temp_bytes, self.alias_bytes)
        if any(part is None for part in parts):
            return None
        argument, output, temp, alias = (part or 0 for part in parts)
        return argument + output + temp - alias


def lower(
    program: decode.Program, params: Weights, drafter_params: Weights, *, batch: int, capacity: int, cache_dtype: Any
) -> jax.stages.Lowered:
    """The donated loop of rounds (`decode.run`), lowered from shapes: nothing is allocated."""
    params, drafter_params = structs(params), structs(drafter_params)
    state = state_shapes(program, params, drafter_params, batch=batch, capacity=capacity, cache_dtype=cache_dtype)
    return decode.run.lower(program, params, drafter_params, state)


def compiled(
    program: decode.Program, params: Weights, drafter_params: Weights, *, batch: int, capacity: int, cache_dtype: Any
) -> Compiled:
    """Compile `decode.run` for this backend and report its memory. Takes seconds for a large model."""
    lowered = lower(program, params, drafter_params, batch=batch, capacity=capacity, cache_dtype=cache_dtype)
    return read(lowered.compile(compiler_options=options()))


def options() -> dict[str, Any]:
    """Those of this backend under which buffers are as in the real loop, and known sooner."""
    return dict(QUICK) if jax.default_backend() == "cpu" else {}


def read(executable: jax.stages.Compiled) -> Compiled:
    """The figures of a compiled program.

    A program with arguments whose analysis says zero bytes of them was not analysed: all is unknown.
    """
    analysis = executable.memory_analysis()
    if analysis is None or not analysis.argument_size_in_bytes:
        return Compiled()
    return Compiled(
        analysis.argument_size_in_bytes,
        analysis.output_size_in_bytes,
        analysis.temp_size_in_bytes,
        analysis.alias_size_in_bytes,
    )
