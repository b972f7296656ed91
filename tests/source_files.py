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

    A module is not said to import the `__init__.py` of the packages that it
    lies in, although Python runs them: they import it.
    """
    found = (_file_of(name) for name in imported_names(path))
    return sorted({file for file in found if file} - {path})


def target_of(path):
    """The name of a file's Bazel target: its path, or that of its package."""
    return path.removesuffix(".py").removesuffix("/__init__")


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
