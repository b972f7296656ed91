"""The package is typed: users' mistakes are found by a type checker."""

import importlib
import inspect
import os
import re
import subprocess
import sys
import tempfile

from absl.testing import absltest

from tests import architecture_test
from tests.source_files import REPOSITORY

# What is wrong stands beside what a type checker says of it.
SCRIPT = """
import keras
import tfscale

mesh = tfscale.device_mesh(data="2")  # arg-type
mesh = tfscale.device_mesh(data=2)
tfscale.use_virtual_devices(8, "GPU", 3)  # call-arg
strategy = tfscale.MeshStrategy(mesh, zero_stage="1")  # arg-type
strategy = tfscale.MeshStrategy(mesh, zero_stage=1)
strategy.device_grid.append(1)  # attr-defined
model = tfscale.PipelineModel(keras.Model(), "8")  # arg-type
model = tfscale.PipelineModel(keras.Model(), 8, balance=3)  # arg-type
model = tfscale.PipelineModel(keras.Model(), 8, recompute=True)
model.pipeline_summary(line_length="80")  # arg-type
tfscale.layers.ColumnParallelDense("8")  # arg-type
tfscale.layers.ColumnParallelDense(8, gather_output=False)
tfscale.callbacks.Throughput(peak_tflops="much")  # arg-type
tfscale.schedules.gpipe("2", 8)  # arg-type
"""


_UNTYPED = re.compile(r"\b(Any|(keras|tensorflow)\.[\w.]+)\b")


def _imported(package, name):
    """Its name in the script, where `tfscale.plan` would be a function."""
    return f"{package}.{name}".replace(".", "_")


def wrong_calls():
    """`(line, names)`: a call of all that is public, and what is wrong in it.

    Every argument is a plain object. What takes anything, or what is a class
    of Keras or TensorFlow, of which a type checker knows nothing, may be one.
    """
    for package, name in architecture_test.public_names():
        value = getattr(importlib.import_module(package), name)
        # A base comes behind what is made of it.
        own = dict(reversed(list(functions_of(value))))
        for method, function in own.items():
            if isinstance(getattr(value, method, None), property):
                continue
            parameters = [
                parameter
                for parameter in inspect.signature(function).parameters.values()
                if parameter.name not in ("self", "cls")
                and parameter.kind
                not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            ]
            arguments = ", ".join(f"{p.name}=wrong" for p in parameters)
            called = _imported(package, name)
            if inspect.isclass(value) and method != "__init__":
                line = f"def f(x: {called}): x.{method}({arguments})"
            else:
                line = f"{called}({arguments})"
            yield (
                line,
                {
                    parameter.name
                    for parameter in parameters
                    if not _UNTYPED.search(
                        inspect.formatannotation(parameter.annotation)
                    )
                },
            )


class TypesTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.calls = list(wrong_calls())
        lines = [
            *SCRIPT.splitlines(),
            *(
                f"from {package} import {name} as {_imported(package, name)}"
                for package, name in architecture_test.public_names()
            ),
            "wrong = object()",
        ]
        cls.first_call = len(lines) + 1
        for number, (line, _) in enumerate(cls.calls):
            lines.append(line.replace("def f(", f"def f{number}("))
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "script.py")
            with open(path, "w") as file:
                file.write("\n".join(lines))
            process = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "mypy",
                    "--check-untyped-defs",
                    "--follow-imports=silent",
                    "--show-error-codes",
                    f"--cache-dir={folder}",
                    path,
                ],
                capture_output=True,
                cwd=REPOSITORY,
                text=True,
            )
        cls.said = process.stdout + process.stderr
        cls.errors = [
            (int(line.split(":")[1]), line)
            for line in process.stdout.splitlines()
            if ": error: " in line
        ]

    def test_wrong_types_in_a_script_are_found(self):
        found = [
            (number, line.rpartition("[")[2].rstrip("]"))
            for number, line in self.errors
            if number < self.first_call
        ]
        expected = [
            (number, line.partition("  # ")[2])
            for number, line in enumerate(SCRIPT.splitlines(), 1)
            if "  # " in line
        ]
        self.assertEqual(found, expected, self.said)

    def test_a_wrong_type_is_found_of_all_that_is_public(self):
        self.assertGreater(len(self.calls), 200)
        for number, (line, names) in enumerate(self.calls, self.first_call):
            errors = [text for place, text in self.errors if place == number]
            found = re.findall(r'Argument "(\w+)"', "\n".join(errors))
            with self.subTest(line):
                self.assertLessEqual(names, set(found), errors)
                # Nor is it a call that cannot be made.
                self.assertLen(found, len(errors), errors)

    def test_public_functions_and_methods_are_annotated(self):
        for package, name in architecture_test.public_names():
            value = getattr(importlib.import_module(package), name)
            for method, function in functions_of(value):
                signature = inspect.signature(function)
                with self.subTest(f"{package}.{name}: {method}"):
                    for parameter in signature.parameters.values():
                        if parameter.name not in ("self", "cls"):
                            self.assertIsNot(
                                parameter.annotation, parameter.empty
                            )
                    if method != "__init__":
                        self.assertIsNot(
                            signature.return_annotation, signature.empty
                        )


def functions_of(value):
    """A function, or `(name, function)` of a class's own public methods."""
    if inspect.isfunction(value):
        yield value.__name__, value
    for base in value.__mro__ if inspect.isclass(value) else ():
        if not base.__module__.startswith("tfscale."):
            continue
        for name, member in vars(base).items():
            if name.startswith("_") and name != "__init__":
                continue
            if isinstance(member, property):
                member = member.fget
            function = inspect.unwrap(getattr(member, "__func__", member))
            # Those that `dataclasses` and `NamedTuple` make are not ours.
            if inspect.isfunction(function) and function.__module__.startswith(
                "tfscale."
            ):
                yield name, function


if __name__ == "__main__":
    absltest.main()
