"""Writes the BUILD file from the imports: `python -m tests.build_file > BUILD`.

One target per module, whose deps are what the module imports, so that Bazel
refuses a cycle and the file can be read as the dependency graph.
"""

import ast

from tests import source_files

HEADER = """\
# Written by `python -m tests.build_file > BUILD`; a test compares.
#
# One target per module, deps as imported. Packages from PyPI are no targets:
# they come with the interpreter that runs Bazel's Python rules, installed by
# `pip install -e ".[test]"`, so that setup.cfg stays the only list of them.

load("@rules_python//python:py_binary.bzl", "py_binary")
load("@rules_python//python:py_library.bzl", "py_library")
load("@rules_python//python:py_test.bzl", "py_test")

package(default_visibility = ["//visibility:private"])

licenses(["notice"])

exports_files(["LICENSE"])

# What the tests of the repository itself look at.
filegroup(
    name = "repository",
    srcs = glob(
        [
            "*",
            "benchmarks/**",
            "configs/**",
            "examples/**",
            "tests/**",
            "tfscale/**",
        ],
        exclude = ["**/__pycache__/**"],
    ),
)
"""
PUBLIC = "//visibility:public"
RUNNER = "tests/run_pytest.py"


def build_file():
    """The text of the BUILD file."""
    targets = [
        _target(path) for path in source_files.python_files() if path != RUNNER
    ]
    return "\n".join([HEADER, *targets])


def _target(path):
    deps = [
        ":" + source_files.target_of(file)
        for file in source_files.imported_files(path)
    ]
    attributes = {"name": source_files.target_of(path), "srcs": [path]}
    if path.endswith("_test.py"):
        rule = "py_test"
        attributes["srcs"] = [path, RUNNER]
        attributes["args"] = [path]
        attributes["data"] = _data(path)
        attributes["main"] = RUNNER
        deps.append(":tests/conftest")
    elif path.startswith(("examples", "benchmarks")) and _is_program(path):
        rule = "py_binary"
        attributes["main"] = path
    else:
        rule = "py_library"
    if path.startswith("tfscale/") and path.endswith("__init__.py"):
        attributes["visibility"] = [PUBLIC]
    if path == "tfscale/__init__.py":
        attributes["data"] = ["tfscale/py.typed"]
    attributes["deps"] = sorted(set(deps))
    return _call(rule, attributes)


def _is_program(path):
    return any(
        isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
        for node in source_files.parse(path).body
    )


def _data(path):
    # A test that looks at the repository's files has them all.
    if "tests/source_files.py" in source_files.imported_files(path):
        return [":repository"]
    return ["setup.cfg"]


def _call(rule, attributes):
    # The order of attributes is buildifier's.
    order = ("name", "srcs", "args", "data", "main", "visibility", "deps")
    lines = [f"{rule}("]
    for name in order:
        value = attributes.get(name)
        if isinstance(value, str):
            lines.append(f'    {name} = "{value}",')
        elif value and len(value) == 1:
            lines.append(f'    {name} = ["{value[0]}"],')
        elif value:
            lines.append(f"    {name} = [")
            lines += [f'        "{item}",' for item in value]
            lines.append("    ],")
    return "\n".join([*lines, ")", ""])


if __name__ == "__main__":
    print(build_file(), end="")
