"""`specjax drafters`: what there is to choose from."""

from __future__ import annotations

import argparse

from specjax import plugins


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options."""


def run(args: argparse.Namespace) -> int:
    """One line a drafter, and one with its settings."""
    for name, text in plugins.available().items():
        print(f"{name:12} {text}")
        if name != "none":
            settings = plugins.settings_of(name).items()
            print(f"{'':12}   {', '.join(f'{field}={value!r}' for field, value in settings)}")
    print("\nor a file of your own: --drafter ./file.py:Class, or the folder of a trained one: --drafter ./folder")
    print("settings go behind: --drafter ngram:prompt_lookup_max=2,num_speculative_tokens=5")
    return 0
