"""The page of the input: what it says runs, and has every source."""

import os
import re

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest

from tests.source_files import REPOSITORY
from tfscale import data

_PATH = os.path.join(REPOSITORY, "docs", "input.md")


class InputPageTest(tf.test.TestCase):
    @pytest.mark.crossing
    def test_its_programs_run_one_after_the_other(self):
        with open(_PATH, encoding="utf-8") as file:
            programs = re.findall(
                r"^```python\n(.*?)^```", file.read(), re.M | re.S
            )
        self.assertLen(programs, 4)
        here = os.getcwd()
        os.chdir(self.create_tempdir().full_path)
        self.addCleanup(os.chdir, here)
        for number in range(16):
            os.makedirs(f"photos/{number % 2}", exist_ok=True)
            picture = np.full([40 + number, 40, 3], number, np.uint8)
            tf.io.write_file(
                f"photos/{number % 2}/{number}.png", tf.io.encode_png(picture)
            )
        names = {}
        for program in programs:
            exec(program, names)
        self.assertEqual(names["train"].position.value, (0, 3, 0))

    def test_every_source_is_in_its_table(self):
        with open(_PATH, encoding="utf-8") as file:
            text = file.read()
        sources = [
            name
            for name in data.__all__
            if name.islower()
            and name not in ("benchmark", "explain", "lint", "pipeline")
            and name != "packed_attention_mask"  # for models
        ]
        for name in sources:
            self.assertIn(f"| `data.{name}(", text)


if __name__ == "__main__":
    absltest.main()
