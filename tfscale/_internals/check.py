"""Refuses a Keras or TensorFlow in which a name of the tables is missing.

An overridden method that another release renames is silently never called. So
all names are checked first, when this module is imported.
"""

import functools
import importlib.util
import inspect
import pathlib
import pkgutil
import re
import types
from collections.abc import Iterator
from typing import Any

from tfscale import _version_check
from tfscale._internals.keras_names import KERAS
from tfscale._internals.layers import hub_rows
from tfscale._internals.tensorflow_names import TENSORFLOW


def _rows() -> Iterator[tuple[str, str, str, str]]:
    """Package, what has a name, the name, and why it is relied on."""
    for package, prefix, table in (
        ("keras", "keras.src.", KERAS),
        ("tensorflow", "tensorflow.", TENSORFLOW),
    ):
        owner = ""
        for line in table.strip().splitlines():
            if line.startswith(" "):
                names, why = line.strip().split(": ", 1)
                for name in names.split(", "):
                    yield package, owner, name, why
            elif not line.startswith("#"):
                owner = prefix + line
    for row in hub_rows():
        yield "keras_hub", *row


ROWS = list(_rows())


def check() -> None:
    """Raises an `ImportError` unless every name of the tables is there."""
    missing = [row for row in ROWS if not has(*row[1:3])]
    if not missing:
        return
    received = ", ".join(
        _version_check.installed(package)
        for package in dict.fromkeys(package for package, *_ in missing)
    )
    names = "".join(
        f"\n  `{owner}` has no `{name}` (for: {why})"
        for _, owner, name, why in missing
    )
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

    An inherited name does not count: the class' own is gone. `owner` may be the
    path of a file of keras_hub, which has every name if it is not there.
    """
    if owner.startswith("keras_hub/"):
        folder = _folder_of_hub()
        if folder is None or not (folder / owner).exists():
            return True
        text = (folder / owner).read_text(encoding="utf-8")
        return re.search(rf"\b{name}\b", text) is not None
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
    found = pkgutil.resolve_name(owner)
    if isinstance(found, property):
        found = found.fget
    return inspect.unwrap(found) if callable(found) else found


@functools.cache
def _folder_of_hub() -> pathlib.Path | None:
    spec = importlib.util.find_spec("keras_hub")
    if spec is None or spec.origin is None:
        return None
    return pathlib.Path(spec.origin).parent.parent


check()
