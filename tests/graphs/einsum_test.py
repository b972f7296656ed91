"""Labels of the dims of einsums, by which layers and operations are split."""

from absl.testing import absltest

from tfscale.graphs import einsum


class EinsumTest(absltest.TestCase):
    def test_terms_have_a_point_for_an_ellipsis(self):
        self.assertEqual(
            einsum.einsum_terms(" ...a, ab ->...b"), (".a", "ab", ".b")
        )

    def test_dims_of_an_ellipsis_count_from_the_right(self):
        # The second operand has one dim less, which is broadcast.
        self.assertEqual(
            einsum.einsum_labels("...a,...a->...", [3, 2, 2]),
            [(-2, -1, "a"), (-1, "a"), (-2, -1)],
        )

    def test_an_ellipsis_may_stand_for_nothing(self):
        self.assertEqual(
            einsum.einsum_labels("a...b,b->a...", [2, 1, 1]),
            [("a", "b"), ("b",), ("a",)],
        )


if __name__ == "__main__":
    absltest.main()
