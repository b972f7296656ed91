"""The Python files of the repository, and who imports whom, read by AST."""

import ast
import functools
import os

REPOSITORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FOLDERS = ("tfscale", "examples", "benchmarks", "tests")


@functools.cache
def python_files():
    """Paths of all Python files, relative to the repository, sorted."""
    paths = []
    for folder in FOLDERS:
        for parent, _, names in os.walk(os.path.join(REPOSITORY, folder)):
            paths += [
                os.path.relpath(os.path.join(parent, name), REPOSITORY)
                for name in names
                if name.endswith(".py")
            ]
    return tuple(sorted(paths))


@functools.cache
def parse(path):
    """The syntax tree of a file."""
    with open(os.path.join(REPOSITORY, path), encoding="utf-8") as file:
        return ast.parse(file.read(), path)


@functools.cache
def imported_names(path):
    """Dotted names that a file imports anywhere, `from a import b` as `a.b`."""
    names = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(
                    "Imports must be absolute. "
                    f"Received: a relative import in {path}:{node.lineno}."
                )
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


def imported_files(path):
    """The repository's files that a file imports, without the file itself.

    To import a module is to import the packages that it lies in. A module is
    not said to import the `__init__.py` of those that it lies in itself,
    although Python runs them: they import it.
    """
    found = set()
    for name in imported_names(path):
        file = _file_of(name)
        if file:
            found |= {file, *_inits_above(file)} - set(_inits_above(path))
    return sorted(found - {path})


def _inits_above(path):
    """The `__init__.py` of all packages that a file lies in."""
    folders = path.split("/")[:-1]
    inits = (
        "/".join([*folders[:end], "__init__.py"])
        for end in range(1, len(folders) + 1)
    )
    return [init for init in inits if init in python_files()]


def _file_of(name):
    """The file of module `a.b.c`, or of `a.b` where `c` is a name in it."""
    parts = name.split(".")
    while parts and parts[0] in FOLDERS:
        stem = "/".join(parts)
        for path in (f"{stem}.py", f"{stem}/__init__.py"):
            if path in python_files():
                return path
        parts.pop()
    return None
