"""The package is typed: users' mistakes are found by a type checker."""

import importlib
import inspect
import os
import subprocess
import sys

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
tfscale.callbacks.InputWait(threshold="much")  # arg-type
tfscale.pipeline.gpipe("2", 8)  # arg-type
"""


class TypesTest(absltest.TestCase):
    def test_wrong_types_in_a_script_are_found(self):
        path = os.path.join(self.create_tempdir().full_path, "script.py")
        with open(path, "w") as file:
            file.write(SCRIPT)
        process = subprocess.run(
            [
                sys.executable,
                "-m",
                "mypy",
                "--follow-imports=silent",
                "--show-error-codes",
                f"--cache-dir={self.create_tempdir().full_path}",
                path,
            ],
            capture_output=True,
            cwd=REPOSITORY,
            text=True,
        )
        found = [
            (int(line.split(":")[1]), line.rpartition("[")[2].rstrip("]"))
            for line in process.stdout.splitlines()
            if ": error: " in line
        ]
        expected = [
            (number, line.partition("  # ")[2])
            for number, line in enumerate(SCRIPT.splitlines(), 1)
            if "  # " in line
        ]
        self.assertEqual(found, expected, process.stdout + process.stderr)

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
