"""Classes of a researcher's own file: `./mine.py:Mine`. The file is run once for each of its contents."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

Test = Callable[[type], bool]


def find_class(spec: str, role: str, test: Test) -> type[Any]:
    """The class that `./file.py:Class` names, or the only one of `./file.py` that passes the test.

    Args:
      role: what the class is to be, for messages: `drafter` or `rule`.

    Raises:
      ValueError: no such file or class, or several where none is named.
      RuntimeError: the file raises, with its error.
    """
    path, _, name = spec.partition(":")
    return only_class(_run(Path(path).expanduser(), role), name or None, role, test)


def only_class(module: ModuleType, name: str | None, role: str, test: Test) -> type[Any]:
    """The named class of those that a module defines, or the only one."""
    kinds = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__ and test(value)
    }
    if name is not None and name not in kinds:
        raise ValueError(f"no {role} class {name!r} in {module.__file__}: it defines {', '.join(kinds) or 'none'}")
    if name is None and len(kinds) != 1:
        found = ", ".join(kinds) or "none"
        raise ValueError(f"{module.__file__} defines {len(kinds)} {role}s ({found}): name one, as file.py:Class")
    return kinds[name] if name is not None else next(iter(kinds.values()))


def _run(path: Path, role: str) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"no {role} file {path}: give the path of a Python file, as ./file.py:Class")
    digest = hashlib.sha256(str(path.resolve()).encode() + path.read_bytes()).hexdigest()[:16]
    name = f"specjax_user_{path.stem}_{digest}"
    if name in sys.modules:  # a class defined again would be unequal to the first, and compile everything again
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file: give one, as ./file.py:Class")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise RuntimeError(f"{role} file {path} raised {type(error).__name__}: {error}") from error
    return module
