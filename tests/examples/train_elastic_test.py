import re

from absl.testing import absltest
from absl.testing import parameterized

from tests import forked_python
from tests.source_files import REPOSITORY


class TrainElasticTest(parameterized.TestCase):
    def test_a_plan_against_a_fixed_number(self):
        said = forked_python.output(
            [
                *("-m", "examples.train_elastic", "--plan=0:1,1:2"),
                *("--num_rows=256", "--num_epochs=3"),
            ],
            REPOSITORY,
            timeout=300,
        )
        rows = re.findall(
            r"^ +(\d) +(\d) (\d\.\d+) +(\d\.\d+) +(\d+\.\d+)$", said, re.M
        )
        self.assertEqual([int(row[0]) for row in rows], [0, 1, 2] * 2, said)
        self.assertEqual([int(row[1]) for row in rows], [1, 2, 2, 2, 2, 2])
        totals = re.findall(r"([\d.]+) device hours to a loss of (\S+\d)", said)
        for index, (hours, last) in enumerate(totals):
            epochs = rows[3 * index : 3 * index + 3]
            seconds = sum(float(row[4]) for row in epochs)
            self.assertAlmostEqual(3600 * float(hours), seconds, delta=0.1)
            self.assertEqual(last, epochs[-1][2])
            self.assertLess(float(last), float(epochs[0][2]))
        self.assertLen(totals, 2)

    @parameterized.parameters("1:2", "0:0", "0", "0:one")
    def test_a_plan_that_makes_no_sense(self, plan):
        process = forked_python.run(
            ["-m", "examples.train_elastic", f"--plan={plan}"], REPOSITORY
        )
        self.assertEqual(process.returncode, 1)
        self.assertIn(f"Received: --plan={plan}", process.stderr)


if __name__ == "__main__":
    absltest.main()
