"""Which cases of a crossing run always."""

from absl.testing import absltest
from absl.testing import parameterized

from tests import crossings

ROWS = [f"test_it({kind}, data={n})" for kind in "abcdefgh" for n in range(8)]


def chosen(rows, every=4):
    return {rows[index] for index in crossings.always(rows, every)}


class CrossingsTest(parameterized.TestCase):
    @parameterized.parameters(0, 7, 63)
    def test_a_row_that_is_added_changes_no_other(self, place):
        with_more = [*ROWS[:place], "test_it(new)", *ROWS[place:]]
        self.assertEqual(chosen(with_more) - {"test_it(new)"}, chosen(ROWS))

    def test_the_order_of_rows_does_not_count(self):
        self.assertEqual(chosen(ROWS[::-1]), chosen(ROWS))

    @parameterized.parameters(2, 4, 8)
    def test_about_one_of_so_many_is_chosen(self, every):
        expected = len(ROWS) / every
        self.assertBetween(len(chosen(ROWS, every)), expected / 2, expected * 2)

    def test_a_small_table_has_a_row_that_runs(self):
        for row in ROWS:
            self.assertEqual(chosen([row]), {row})

    def test_addresses_of_functions_do_not_count(self):
        def rows(address):
            return [f"({x}, <function f at 0x{address}>)" for x in range(40)]

        self.assertEqual(
            crossings.always(rows("7f01"), 4), crossings.always(rows("9abc"), 4)
        )

    def test_rows_of_one_name_are_told_apart(self):
        found = crossings.always(["(<function <lambda> at 0x1>)"] * 64, 4)
        self.assertBetween(len(found), 8, 32)


if __name__ == "__main__":
    absltest.main()
