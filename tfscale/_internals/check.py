"""Refuses a Keras or TensorFlow in which a name of the tables is missing.

An overridden method that another release renames is silently never called. So
all names are checked first, when this module is imported.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import pathlib
import re
import types
from collections.abc import Iterator
from typing import Any

from tfscale import _version_check
from tfscale._internals.hub_names import KERAS_HUB
from tfscale._internals.keras_names import KERAS
from tfscale._internals.tensorflow_names import TENSORFLOW


def check() -> None:
    """Raises unless every name of the tables is there.

    Raises:
        ImportError: If one is missing, with the name, what it is for, the
            versions that are installed and those that are known to work.
    """
    missing = [
        (package, f"`{owner}` has no `{name}`", why)
        for package, table in (("keras", KERAS), ("tensorflow", TENSORFLOW))
        for owner, names in table.items()
        for name, why in names.items()
        if not has(owner, name)
    ] + [
        ("keras-hub", f"`{path}` has no `{name}`", why)
        for path, name, why in _missing_in_hub()
    ]
    if not missing:
        return
    packages = dict.fromkeys(package for package, _, _ in missing)
    received = ", ".join(
        f"{package} {importlib.metadata.version(package)}"
        for package in packages
    )
    names = "".join(f"\n  {text} (for: {why})" for _, text, why in missing)
    known = ", ".join(
        f'"{package}=={last}.*"'
        for package, (_, last) in _version_check.TESTED.items()
    )
    raise ImportError(
        "tfscale relies on names that are private to Keras and TensorFlow, "
        f"and one is missing. Received: {received}, in which{names}\n"
        f"Known to work: {known}. Install these, or a newer tfscale."
    )


def has(owner: str, name: str) -> bool:
    """Whether a module or class defines a name, or a function's code uses it.

    An inherited name does not count: the class' own is gone.
    """
    try:
        found = resolve(owner)
    except (AttributeError, ImportError):
        return False
    if isinstance(found, types.FunctionType):
        code = found.__code__
        # Inner functions are constants of the code.
        made = [getattr(const, "co_name", const) for const in code.co_consts]
        return name in code.co_names or name in made
    return name in vars(found)


def resolve(owner: str) -> Any:
    """A module, a class, or the innermost function of a method or property."""
    module, names = _module_of(owner)
    found = functools.reduce(getattr, names, module)
    if isinstance(found, property):
        found = found.fget
    return inspect.unwrap(found) if callable(found) else found


def _module_of(owner):
    """The longest part of a dotted name that is a module, and the rest."""
    names = owner.split(".")
    for end in range(len(names), 0, -1):
        name = ".".join(names[:end])
        try:
            return importlib.import_module(name), names[end:]
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):
                raise
    raise ModuleNotFoundError(owner)


def _missing_in_hub() -> Iterator[tuple[str, str, str]]:
    spec = importlib.util.find_spec("keras_hub")
    if spec is None or spec.origin is None:
        return
    folder = pathlib.Path(spec.origin).parent.parent
    for path, names in KERAS_HUB.items():
        if (folder / path).exists():
            text = (folder / path).read_text(encoding="utf-8")
            words = set(re.findall(r"\w+", text))
            for name, why in names.items():
                if name not in words:
                    yield path, name, why


check()
