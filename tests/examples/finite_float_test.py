"""Numbers of examples are finite."""

import glob
import os
import re

from absl.testing import absltest
from absl.testing import parameterized

from tests import forked_python
from tests.source_files import REPOSITORY

_DEFINED = re.compile(r"finite_float\.define\(\s*\"(\w+)\"")
# A program that has the flags of a module.
_PROGRAMS = {"training_flags": "train_gpt"}


def flags_of_examples():
    for path in sorted(glob.glob(os.path.join(REPOSITORY, "examples/*.py"))):
        name = os.path.basename(path).removesuffix(".py")
        with open(path) as file:
            for flag in _DEFINED.findall(file.read()):
                yield _PROGRAMS.get(name, name), flag


class FiniteFloatTest(parameterized.TestCase):
    @parameterized.parameters(*flags_of_examples())
    def test_it_refuses(self, program, flag):
        # `--learning_rate=nan` trained to the end: bounds let a NaN pass.
        for value in ("nan", "inf"):
            process = forked_python.run(
                [
                    *("-m", f"examples.{program}", f"--{flag}={value}"),
                    "--only_check_args",
                ],
                REPOSITORY,
                timeout=100,
            )
            self.assertEqual(process.returncode, 1, process.stderr)
            self.assertRegex(process.stderr + process.stdout, f"--{flag}")


if __name__ == "__main__":
    absltest.main()
