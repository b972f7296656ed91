"""Which cases of a crossing run always."""

import itertools

from absl.testing import absltest
from absl.testing import parameterized

from tests import crossings

ROWS = [f"test_it({kind}, data={n})" for kind in "abcdefgh" for n in range(8)]


def chosen(rows, every=4):
    return {rows[index] for index in crossings.always(rows, every)}


class CrossingsTest(parameterized.TestCase):
    @parameterized.parameters(1, 7, 64)
    def test_a_row_that_is_added_takes_the_place_of_one_at_most(self, place):
        for name in "klmnopq":
            with_more = [*ROWS[:place], f"test_it({name})", *ROWS[place:]]
            self.assertLessEqual(len(chosen(ROWS) - chosen(with_more)), 1)

    def test_the_first_row_runs(self):
        for row in ROWS:
            self.assertIn(row, chosen([row, *ROWS[:8]]))

    def test_the_order_of_other_rows_does_not_count(self):
        self.assertEqual(chosen([ROWS[0], *ROWS[:0:-1]]), chosen(ROWS))

    @parameterized.parameters((64, 4, 16), (65, 4, 17), (3, 2, 2), (3, 3, 1))
    def test_one_of_so_many_is_chosen(self, number, every, expected):
        rows = [*ROWS, "test_it(new)"][:number]
        self.assertLen(chosen(rows, every), expected)

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
        self.assertLen(found, 16)

    @parameterized.parameters(
        (dict(a="xyz", b=(1, 2), c=(False, True)), 6),
        (dict(a="uvwxyz", b=range(4), c="rs", d=(False, True)), 24),
        (dict(a="xy", b="rs"), 4),
        (dict(a="xyzxx", b=[[], [], {}]), 15),
    )
    def test_each_two_values_meet_in_few_rows(self, tables, number):
        rows = crossings.pairs(**tables)
        self.assertLen(rows, number)
        self.assertEqual(rows[0], {k: next(iter(v)) for k, v in tables.items()})
        for one, other in itertools.combinations(tables, 2):
            found = [(row[one], row[other]) for row in rows]
            for pair in itertools.product(tables[one], tables[other]):
                self.assertIn(pair, found)

    def test_values_that_exclude_each_other_do_not_meet(self):
        def can_be(row):
            return not (row.get("a") == "x" and row.get("b") == 2)

        rows = crossings.pairs(can_be, a="wxy", b=(1, 2), c="rs")
        found = {(row["a"], row["b"]) for row in rows}
        self.assertLen(found, 5)
        self.assertNotIn(("x", 2), found)


if __name__ == "__main__":
    absltest.main()
