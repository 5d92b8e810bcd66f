"""What the compilers say: their allocations and refusals read, and the committed table of all of them."""

import argparse
import dataclasses
import itertools
import json
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from fixtures_memory import preset  # noqa: F401
from specjax.experiments import memory_table

from specjax.cli import memory as command
from specjax.memory import aot, hardware, measured_device
from specjax.memory.aot import Ahead
from specjax.memory.buffer_assignment import Assignment, dump_options, parse, read_dump, read_refusal
from specjax.memory.buffers import PHASES
from specjax.memory.compiler import QUICK, lower, read
from specjax.memory.gpu_targets import GPU_TARGETS
from specjax.memory.strategy import Strategy

ROOT = Path(__file__).parent.parent
ASSIGNMENT = """BufferAssignment:
allocation 0: size 4096, parameter 0, shape |bf16[2,8]| at ShapeIndex {}:
 value: <1 param.0 @0> (size=4096,offset=0): bf16[2,8]{1,0:T(8,128)(2,1)}
allocation 1: size 512, output shape is |(f32[8])|, maybe-live-out:
 value: <2 tuple{} @0> (size=512,offset=0): (f32[8]{0:T(128)})
allocation 2: size 9000, color 1, preallocated-temp:
 value: <3 copy.1 @1> (size=9000,offset=0): f32[8]{0:T(128)S(1)}
allocation 3: size 3000, preallocated-temp:
 value: <4 small @0> (size=500,offset=0): f32[1,125]{1,0}
 value: <5 fusion.1{0} @0> (size=1000,offset=200): f32[250]{0:T(128)}
 value: <6 later @0> (size=600,offset=700): f32[150]{0:T(128)}
 value: <7 both{} @0> (size=512,offset=2000): (f32[1], f32[2])

Total bytes used: 16608
"""
PROGRAM = '  %fusion.1 = f32[250]{0:T(128)} fusion(%x), metadata={op_name="jit(run)/while/body/sort" stack=3}\n'


def test_every_byte_of_an_assignment_has_the_name_of_the_largest_value_there():
    found = parse(ASSIGNMENT, PROGRAM)
    assert (found.argument_bytes, found.temp_bytes, found.on_chip_bytes, found.total_bytes) == (4096, 3512, 9000, 7608)
    names = dict(found.temporaries)
    assert names["tuple: addresses"] == 512
    assert names["both: addresses"] == 1000  # and what aligns them
    assert names["alignment"] == 700
    assert names["sort: f32[250]"] == 1000
    assert names["later: f32[150]"] == 100  # of 600: the rest lies under the larger one
    assert names["small: f32[1,125]"] == 200
    assert sum(names.values()) == found.temp_bytes
    assert list(names.values()) == sorted(names.values(), reverse=True)


def test_the_assignment_of_a_round_names_the_temporaries_that_its_analysis_counts(tmp_path):
    strategy = Strategy("smollm2-135m", "none", 1, 64, dtype="float32", platform="cpu")
    program, params, own = strategy.shapes()
    assert read_dump(str(tmp_path)) is None
    lowered = lower(program, params, own, **strategy.options())
    figures = read(lowered.compile(QUICK | dump_options(str(tmp_path))))
    found = read_dump(str(tmp_path))
    assert found.argument_bytes == figures.argument_bytes
    assert found.on_chip_bytes == 0
    assert found.temp_bytes == sum(size for _, size in found.temporaries)
    assert found.total_bytes == pytest.approx(figures.total_bytes, abs=10_000)  # constants are in one, not in the other
    assert any("f32[" in name and size > 1000 for name, size in found.temporaries)


def test_a_refusal_that_says_nothing_is_unknown():
    found = read_refusal("RESOURCE_EXHAUSTED: no.")
    assert (found.needed_bytes, found.limit_bytes, found.parts, found.largest) == (None, None, (), ())
    assert "does not say" in str(found)


def test_a_refusal_with_its_breakdown():
    found = read_refusal(
        """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 20.50G of
15.75G hbm. Exceeded hbm capacity by 4.75G.

Total hbm usage >= 20.76G:
    reserved        258.00M
    program           4.50G
    arguments        16.00G

Output size 0B; shares 0B with arguments.

Program hbm requirement 4.50G:
    HLO temp          4.50G (100.0% utilization: Unpadded (4.50G) Padded (4.50G), 0.0% fragmentation (0B))

  Largest program allocations in hbm:

  1. Size: 4.00G
     Operator: op_name="jit(run)/while/body/cond/sort" source_file="sampling.py" source_line=1
     Shape: f32[8,6,32064]{1,2,0:T(8,128)}
     Unpadded size: 5.87M
     Allocation type: HLO temp
     ==========================

  2. Size: 512.00M
     Shape: bf16[8,2,4096,128]{3,2,1,0:T(8,128)(2,1)}
     Allocation type: HLO temp
     ==========================
""".replace("of\n15", "of 15")
    )
    assert (found.needed_bytes, found.limit_bytes) == (int(20.5 * 2**30), int(15.75 * 2**30))
    assert found.parts == (("reserved", 258 * 2**20), ("program", int(4.5 * 2**30)), ("arguments", 16 * 2**30))
    assert found.largest == (
        ("cond/sort: f32[8,6,32064]", 4 * 2**30),
        ("HLO temp: bf16[8,2,4096,128]", 512 * 2**20),
    )
    assert str(found).startswith("needs 20.50 of 15.75 GiB: reserved 0.25, program 4.50, arguments 16.00; the largest:")


def test_temporaries_that_alone_are_too_much():
    found = read_refusal(
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (40.42G) "
        "exceeds available HBM (15.75G)."
    )
    assert (found.needed_bytes, found.limit_bytes) == (int(40.42 * 2**30), int(15.75 * 2**30))


def arguments(*words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


def test_the_command_shows_what_a_compiler_says_or_refuses(monkeypatch, capsys):
    answers = iter(
        [
            Ahead(Assignment(2**30, 2**20, 0, (("sort: f32[8,49152]", 2**20),)), "", 1),
            Ahead(None, "RESOURCE_EXHAUSTED: temporaries (40.42G) exceeds available HBM (15.75G).", 1),
        ]
    )
    monkeypatch.setattr(command, "check_installed", lambda device: None)
    monkeypatch.setattr(command, "compile_ahead", lambda *args, **options: next(answers))
    small = ("--target", "smollm2-135m", "--drafter", "ngram", "--context", "256", "--device", "tpu-v5e")
    assert command.run(arguments(*small, "--compile")) == 0
    shown = capsys.readouterr().out
    assert "none: arguments 1.000 GiB, temporaries 1.0 MiB (sort: f32[8,49152] 1.0)" in shown
    assert "ngram: does not fit: needs 40.42 of 15.75 GiB" in shown


@pytest.mark.parametrize(
    ("name", "mesh", "rule"),
    [("tpu-v5e", "3x3", "2 dimensions, the first two 1 or even, as 2x2"), ("tpu-v5p", "2x2", "3 dimensions")],
)
def test_a_mesh_that_a_tpu_is_not_built_in_is_refused_with_the_rule(name, mesh, rule):
    with pytest.raises(ValueError, match=f"mesh '{mesh}': {name} has {rule}"):
        hardware.check_mesh(hardware.find(name), mesh)
    for name, mesh, written in (("tpu-v5p", "2X2x1", "2x2x1"), ("tpu-v5e", "1", "1x1"), ("h100", "2x4", "8")):
        assert hardware.check_mesh(hardware.find(name), mesh) == written


def test_a_device_says_its_peak_or_nothing(monkeypatch):
    assert measured_device.peak_bytes() is None  # a CPU does not count

    class Fake:
        def __init__(self, stats):
            self.memory_stats = lambda: stats

    devices = [Fake({"peak_bytes_in_use": 5}), Fake({"peak_bytes_in_use": 7}), Fake(None)]
    monkeypatch.setattr(measured_device.jax, "local_devices", lambda: devices)
    assert measured_device.peak_bytes() == 7
    monkeypatch.setattr(measured_device.jax, "local_devices", lambda: [Fake({"peak_bytes_in_use": 0})])
    assert measured_device.peak_bytes() is None  # zero is not known


def test_a_programs_peak_is_the_devices_where_it_rises(monkeypatch):
    program = jax.jit(lambda x: x + 1).lower(jnp.zeros((3,))).compile()
    arguments = (((jax.ShapeDtypeStruct((3,), jnp.float32),)), {})
    for peaks, found in (([None, None], None), ([0, 5, 9], 9), ([5, 5, 9], 9), ([9, 9, 9], None)):
        said = iter(peaks)
        monkeypatch.setattr(measured_device, "peak_bytes", lambda said=said: next(said) or None)
        assert measured_device.measured_peak(program, arguments) == found


def test_this_machine_compiles_and_a_device_that_counts_is_asked(monkeypatch, capsys):
    machine = dataclasses.replace(hardware.find("rtx-4090"), name="this", platform="cpu")
    monkeypatch.setattr(hardware, "find", lambda name: machine)
    asked = []
    monkeypatch.setattr(aot, "measured_peak", lambda *args: asked.append(1) or 2**30 * len(asked))
    tiny = ("--target", "tiny", "--drafter", "external", "--context", "64", "--dtype", "float32")
    assert command.run(arguments(*tiny, "--device", "this", "--compile", "--json")) == 0
    facts = {fact["drafter"]: fact for fact in json.loads(capsys.readouterr().out)}
    for fact in facts.values():
        assert sum(fact["compiler_temporaries"].values()) < fact["compiler_bytes"]
        assert fact["compiler_bytes"] > fact["components"]["target weights"]
    order = sorted(facts, key=lambda name: facts[name]["peak_bytes"])
    assert [facts[name]["device_peak_bytes"] for name in order] == [2**30, 2**31]  # ascending
    assert command.run(arguments(*tiny, "--device", "this", "--compile")) == 0
    assert "the device says" in capsys.readouterr().out


def test_a_round_that_does_not_fit_here_is_a_result(monkeypatch):
    class Full:
        def compile(self, **options):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(aot.compiler, "lower", lambda *args, **options: Full())
    found = aot.compile_here(Strategy("tiny", "none", 1, 64, platform="cpu"))
    assert found.figures is None
    assert "does not fit" in str(found)


def test_a_tpu_v7_is_told_to_keep_one_layout_and_others_are_told_nothing():
    v7, v5e = (aot._environment(hardware.find(name), "2x2x1") for name in ("tpu-v7", "tpu-v5e"))
    assert v7["LIBTPU_INIT_ARGS"] == "--xla_tpu_control_large_2nd_minor_layout_for_x16=false"
    assert v5e["LIBTPU_INIT_ARGS"] == ""


def test_the_extras_bring_the_compilers_that_belong_to_jax():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "jax[tpu]" in extras["tpu-aot"]
    assert "jax[cuda13-local]" in extras["cuda-aot"]


@pytest.mark.parametrize("name", GPU_TARGETS)
def test_a_gpu_target_is_the_device_of_that_name(name):
    device_, target = hardware.find(name), GPU_TARGETS[name]
    assert device_.topology == name
    assert target.memory_bytes == pytest.approx(device_.hbm_bytes, rel=0.08)
    assert target.bandwidth_bytes_per_s == pytest.approx(device_.bandwidth_bytes_per_s, rel=0.05)
    assert f"core_count: {target.cores} " in target.proto


def installed(name):
    try:
        aot.check_installed(hardware.find(name))
    except aot.CompilerMissingError as missing:
        pytest.skip(str(missing))
    return hardware.find(name)


@pytest.mark.parametrize(
    ("name", "mesh", "target", "drafter"),
    [
        ("tpu-v5e", "1x1", "qwen3-0.6b", "ngram"),
        ("tpu-v5e", "1x1", "smollm2-135m", "external"),  # narrow heads, odd widths
        ("tpu-v6e", "2x2", "qwen3-0.6b", "early-exit"),
        ("tpu-v7", "1x1x1", "qwen3-0.6b", "early-exit"),
        ("h100", "1", "qwen3-0.6b", "fp8"),
        ("b200", "1", "qwen3-0.6b", "external"),
    ],
)
def test_the_devices_compiler_agrees_with_the_shapes_and_holds_nothing_twice(name, mesh, target, drafter):
    device_ = installed(name)
    strategy = Strategy(target, drafter, 8, 8192, 2, platform=device_.platform)
    found = aot.compile_ahead(strategy, device_, mesh).figures
    account = strategy.account(hardware.place(name, mesh, 1, strategy.model.config)[1])
    assert found.total_bytes == pytest.approx(account.needed_bytes, rel=0.02 if device_.platform == "tpu" else 0.05)
    held = account.phase_bytes("verify", "weights") + account.phase_bytes("verify", "kv")
    named = max(account.phase_bytes(phase, "buffers") for phase in PHASES)
    assert found.temp_bytes - named < 0.02 * held
    assert sum(size for _, size in found.temporaries) == found.temp_bytes


def test_a_program_that_a_tpu_cannot_hold_is_a_result_with_the_compilers_breakdown():
    found = aot.compile_ahead(Strategy("llama-3.1-8b", "none", 8, 4096), installed("tpu-v5e"), "1x1")
    refused = read_refusal(found.refusal)
    assert refused.needed_bytes > refused.limit_bytes == hardware.find("tpu-v5e").limit_bytes
    assert found.figures.total_bytes > refused.limit_bytes


ROWS = memory_table.read(ROOT / "experiments" / "memory_table.jsonl")
GPUS, ODD = "H100, H200, B200", f"{memory_table.ODD}, of odd widths, on a TPU"
TOLERANCES = {GPUS: 0.05, ODD: 0.03}
"""Of the difference from the shapes, by group; all others 0.02."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(map(str, list(row.values())[:6])))
def test_in_the_committed_table_shapes_and_compilers_agree_and_nothing_is_held_twice(row):
    group = memory_table.group(row)
    assert row["compiler_bytes"] == pytest.approx(row["shapes_bytes"], rel=TOLERANCES.get(group, 0.02))
    assert memory_table.beyond(row) < (0.03 if group == ODD else 0.02)
    assert row["argument_bytes"] + row["temp_bytes"] == row["compiler_bytes"]
    assert sum(size for _, size in row["temporaries"]) == row["temp_bytes"]  # each byte has a name


def test_the_committed_table_is_the_whole_product_of_drafters_targets_devices_meshes_and_contexts():
    drafters = {"none", "ngram", "early-exit", "fp8", "fp8:kv=own", "external"}
    found = {(row["device"], row["target"], row["mesh"], row["context"], row["drafter"]) for row in ROWS}
    for place, target in itertools.product(("tpu-v5e", "tpu-v5p", "tpu-v6e"), ("llama-3.1-8b", "llama-3.1-70b")):
        meshes = {mesh for device_, target_, mesh, _, _ in found if (device_, target_) == (place, target)}
        assert len(meshes) == 2
        assert found >= set(itertools.product([place], [target], meshes, (2048, 16_384, 131_072), drafters))
    assert found >= set(itertools.product(["h100"], ["llama-3.1-8b"], ["1"], (2048, 16_384, 131_072), drafters))
    assert found >= set(itertools.product(["h100"], ["llama-3.1-70b"], ["8"], (2048, 16_384), drafters))
    assert {row["device"] for row in ROWS} >= {"h200", "b200", "tpu-v4", "tpu-v7"}


def test_what_the_compilers_refused_does_not_fit_by_its_shapes_either():
    refused = [row for row in ROWS if row["refusal"]]
    assert refused
    for row in refused:
        found = read_refusal(row["refusal"])
        assert found.needed_bytes > found.limit_bytes
        assert row["shapes_bytes"] > found.limit_bytes
    for row in ROWS:
        assert bool(row["refusal"]) == (row["compiler_bytes"] > hardware.find(row["device"]).limit_bytes)


QUICK_ROWS = [row for row in ROWS[::14] if row["drafter"] != "fp8:kv=own"]  # whose prefill takes long to trace


@pytest.mark.parametrize("row", QUICK_ROWS, ids=lambda row: " ".join(map(str, list(row.values())[:6])))
def test_the_committed_shapes_are_those_of_today(row):
    names = ("target", "drafter", "batch", "context", "window", "dtype", "cache_dtype", "platform")
    strategy = Strategy(*(row[name] for name in names))
    found = strategy.account(hardware.place(row["device"], row["mesh"], 1, strategy.model.config)[1])
    weights_and_kv = (found.phase_bytes(found.peak_phase, group) for group in ("weights", "kv"))
    assert found.needed_bytes == row["shapes_bytes"]
    assert found.phase_bytes(found.peak_phase, "buffers") == row["buffer_bytes"]
    assert sum(weights_and_kv) == row["weight_and_kv_bytes"]


def test_the_tables_in_text_are_those_of_the_rows():
    assert memory_table.table(ROWS) == (ROOT / "experiments" / "memory_table.md").read_text()
    readme = (ROOT / "specjax" / "memory" / "README.md").read_text()
    assert memory_table.into_readme(readme, ROWS) == readme
