"""The number of rows of a microbatch, of memory that is made up."""

from absl.testing import absltest
from absl.testing import parameterized

from tfscale.accumulation.microbatch_size import MicrobatchSize


def tried(takes, num_rows, idle=0.0, gradients=0.0):
    """All numbers of rows that are tried, until one is found."""
    size, found = MicrobatchSize(idle, gradients), []
    while not size.is_found:
        found.append(size.rows)
        size.note(takes(size.rows), num_rows)
    return found, size.rows


class MicrobatchSizeTest(parameterized.TestCase):
    @parameterized.parameters(
        # Bytes by row: as many rows as fit, none too many.
        (lambda rows: 0.01 * rows, 256, 0.0),
        (lambda rows: 0.3 + 0.05 * rows, 64, 0.3),
        # Even one row takes most of it.
        (lambda rows: 0.7 * rows, 64, 0.0),
        # All of it fits.
        (lambda rows: 0.5 + 0.001 * rows, 64, 0.5),
    )
    def test_the_number_is_the_smallest_that_fits(self, takes, num_rows, idle):
        rows, chosen = tried(takes, num_rows, idle)
        number = -(-num_rows // chosen)
        self.assertLessEqual(takes(-(-num_rows // number)), 1.0)
        if number > 1:
            self.assertGreater(takes(-(-num_rows // (number - 1))), 1.0)
        for each in rows:
            self.assertLessEqual(takes(each), 1.0)

    def test_what_an_update_takes_hides_small_microbatches(self):
        def takes(rows):
            return max(0.6, 0.3 + 0.004 * rows)

        rows, chosen = tried(takes, 512, idle=0.3, gradients=0.3)
        self.assertLessEqual(max(map(takes, rows)), 1.0)
        self.assertEqual(-(-512 // chosen), 3)

    def test_a_step_that_took_too_much_is_the_last_of_its_size(self):
        size = MicrobatchSize(idle=0.1, gradients=0.05)
        for peak in (0.2, 0.21, 0.22, 1.3):
            rows = size.rows
            size.note(peak, num_rows=64)
        self.assertTrue(size.is_found)
        self.assertLess(size.rows, rows)

    def test_where_not_even_one_row_fits_it_is_one(self):
        """Weights alone took more than there is: an OverflowError."""
        size = MicrobatchSize(idle=1.5, gradients=0.4)
        size.note(1.7, num_rows=64)
        self.assertEqual((size.rows, size.is_found), (1, True))

    def test_a_smaller_last_batch_decides_nothing(self):
        size = MicrobatchSize(idle=0.1, gradients=0.05)
        size.note(0.11, num_rows=64)
        self.assertEqual(size.rows, 2)
        size.note(0.11, num_rows=1)
        self.assertEqual((size.rows, size.is_found), (2, False))

    def test_a_batch_without_rows_decides_nothing(self):
        """The number of microbatches was divided by its rows."""
        size = MicrobatchSize(idle=0.1, gradients=0.05)
        size.note(0.11, num_rows=0)
        self.assertEqual((size.rows, size.is_found), (1, False))


if __name__ == "__main__":
    absltest.main()
