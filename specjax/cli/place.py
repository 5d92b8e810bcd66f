"""What `specjax memory` and `specjax plan` ask alike: a target, drafters, and the devices that they would run on."""

from __future__ import annotations

import argparse

import jax

from specjax.memory import hardware
from specjax.memory.hardware import Device
from specjax.memory.strategy import DRAFTERS, preset
from specjax.mesh import Layout

DTYPES = ("bfloat16", "float16", "float32")


def add_arguments(parser: argparse.ArgumentParser, dtypes: tuple[str, ...] = DTYPES) -> None:
    """The options of both commands."""
    parser.add_argument("--target", default="llama-3.1-8b", help="a preset; its weights need not exist")
    parser.add_argument(
        "--drafter", action="append", metavar="NAME", dest="drafters",
        help="name, external:PRESET, or with fields as fp8:kv=own; may be repeated "
        f"(default: {', '.join(DRAFTERS)})",
    )  # fmt: skip
    parser.add_argument("--device", default="h100", help=f"{', '.join(hardware.DEVICES)}, or this (measured now)")
    parser.add_argument("--mesh", default="1", help="chips, as 8 or 2x2x2")
    parser.add_argument(
        "--data", type=int, default=1, help="copies of the model in the mesh, each for a part of the rows"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=dtypes)


def stay_off_devices(name: str) -> None:
    """Nothing runs here for a device that isn't here: start none, nor lock its compiler out."""
    if name in hardware.DEVICES:
        jax.config.update("jax_platforms", "cpu")


def find(args: argparse.Namespace, batch: int) -> tuple[Device, Layout]:
    """The device, and how its mesh splits the target and `batch` rows (0: not known yet)."""
    return hardware.place(args.device, args.mesh, args.data, preset(args.target), batch)
