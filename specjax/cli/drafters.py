"""`specjax drafters`: what there is to choose from."""

from __future__ import annotations

import argparse
import dataclasses

from specjax import drafter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options."""


def run(args: argparse.Namespace) -> int:
    """One line a drafter, and one with its settings."""
    for name, text in drafter.available().items():
        kind = drafter.load(name)
        settings = [f"{field.name}={getattr(kind, field.name)!r}" for field in dataclasses.fields(kind)]
        print(f"{name:12} {text}")
        if name != "none":
            print(f"{'':12}   {', '.join(settings)}")
    print("\nor a file of your own: --drafter ./file.py:Class")
    return 0
