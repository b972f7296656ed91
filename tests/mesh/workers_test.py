"""Real worker processes have the numbers of one process.

    this process              runs workers_program.py, then reads its files
      workers_program.py      imports TensorFlow, forks 2 workers, then 4
        worker 0, 1 of 2      all rows (workers_rows.py), then all cases
                              (workers_cases.py): FOLDER/2_0, FOLDER/2_1
        worker 0 to 3 of 4    the short rows: FOLDER/4_0 to FOLDER/4_3
    this process              trains each row alone, and compares it with what
                              all workers found; a subtest names row or case

One row alone: `python -m tests.mesh.workers_program FOLDER ROW`.
"""

import functools
import glob
import os
import pickle
import tempfile

import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized

from tests import forked_python
from tests import same_numbers
from tests.mesh import workers_cases
from tests.mesh import workers_rows
from tests.source_files import REPOSITORY

_SECONDS = 1_200
CROSSED = (*workers_rows.CROSSED, *workers_cases.CROSSED)
ALWAYS = (
    *workers_rows.ALWAYS,
    *(name for name in workers_cases.CASES if name not in CROSSED),
    *workers_cases.REFUSED,
)


@functools.cache
def results_of(names):
    """What each worker found, by number of workers and index; or an error."""
    with tempfile.TemporaryDirectory() as folder:
        process = forked_python.run(
            ["-m", "tests.mesh.workers_program", folder, *names],
            cwd=REPOSITORY,
            timeout=_SECONDS,
        )
        if process.returncode:
            return process.stdout + process.stderr
        found = {}
        for name in glob.glob("[24]_?", root_dir=folder):
            with open(os.path.join(folder, name), "rb") as file:
                found[name] = pickle.load(file)
        return found


class WorkersTest(parameterized.TestCase):
    def results(self, names=ALWAYS):
        found = results_of(names)
        self.assertIsInstance(found, dict, found)
        return found

    def assert_all(self, rows, names, count):
        results = self.results(names)
        for name in set(rows).intersection(names):
            with self.subTest(f"{count} workers: {name}"):
                found = [results[f"{count}_{i}"][name] for i in range(count)]
                for one in found:
                    # A traceback, if there was an error.
                    self.assertIsInstance(one, dict, one)
                self.assert_same(rows[name], found)

    def assert_same(self, row, found):
        outcome = row.reference(row.job)
        expected = workers_rows.result(row, outcome)
        for actual in found:
            same_numbers.assert_same(
                self,
                outcome,
                same_numbers.Outcome(
                    model=None,
                    **{
                        name: actual[name]
                        for name in ("initial", "variables", "slots", "logs")
                    },
                ),
                row.rtol,
            )
            if row.collectives is not None:
                self.assertIn(actual["collectives"], row.possible_collectives)
            if row.is_compiled:
                # None is in a cluster, and all workers have one order.
                self.assertGreater(actual["clusters"], 0)
                self.assertEqual(actual["order"], found[0]["order"])
                self.assertNotEmpty(actual["order"])
            self.assertEqual("predicted" in actual, row.predicts)
            if row.predicts:
                # All rows, in their order, in every worker.
                same_numbers.assert_close(
                    actual["predicted"], expected["predicted"], "predicted"
                )
        # Of what is updated on its own, nothing is added up in another order.
        for name, value in found[0]["variables"].items():
            for other in found[1:]:
                np.testing.assert_array_equal(other["variables"][name], value)

    # The other tests use what the same processes have found.
    def test_two_workers(self):
        self.assert_all(workers_rows.ROWS, ALWAYS, 2)

    def test_four_workers(self):
        self.assert_all(workers_rows.SHORT, ALWAYS, 4)

    @pytest.mark.crossing
    def test_rows_that_cross_others(self):
        self.assert_all(workers_rows.ROWS, CROSSED, 2)
        self.assert_all(workers_rows.SHORT, CROSSED, 4)

    def test_cases(self):
        self.assert_cases(ALWAYS)

    @pytest.mark.crossing
    def test_cases_that_cross_others(self):
        self.assert_cases(CROSSED)

    def assert_cases(self, names):
        results = self.results(names)
        for name in set(workers_cases.CASES).intersection(names):
            with self.subTest(name):
                found = [results[f"2_{i}"]["cases"][name] for i in (0, 1)]
                workers_cases.assert_case(self, name, found)

    def test_what_would_go_wrong_is_an_error(self):
        results = self.results()
        for name, (_, message) in workers_cases.REFUSED.items():
            for index in range(2):
                with self.subTest(f"{name}, worker {index}"):
                    found = results[f"2_{index}"]["cases"][name]
                    self.assertRegex(found, message)


if __name__ == "__main__":
    absltest.main()
