"""Arguments that are integers: of each library, and within their range."""

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from tfscale.integers import check_integer


class CheckIntegerTest(parameterized.TestCase):
    @parameterized.parameters(1, np.int64(1), np.uint8(1))
    def test_an_integer_of_any_library_is_returned_as_pythons(self, value):
        self.assertIs(type(check_integer("count", value)), int)

    @parameterized.parameters(
        True, np.True_, 2.0, 2.5, "2", None, {"value": [2]}
    )
    def test_nothing_else_is_an_integer(self, value):
        with self.assertRaises(TypeError) as caught:
            check_integer("count", value)
        self.assertIn(f"count={value!r}", str(caught.exception))

    def test_a_float_that_is_whole_is_told_what_to_use(self):
        with self.assertRaisesRegex(TypeError, "count=2.0.* count=2[.]$"):
            check_integer("count", 2.0)

    @parameterized.parameters((0, 1), (-1, 0), (2**63, 1), (4, 5))
    def test_it_is_within_its_range(self, value, least):
        with self.assertRaisesRegex(ValueError, f"count={value}"):
            check_integer("count", value, least)
        self.assertEqual(check_integer("count", least, least), least)

    def test_the_rule_is_that_of_the_caller(self):
        with self.assertRaisesRegex(ValueError, "`keep` must be a number of"):
            check_integer("keep", 0, rule="a number of backups, 1 or more")


if __name__ == "__main__":
    absltest.main()
