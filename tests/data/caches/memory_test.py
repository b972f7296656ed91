"""How much memory a cache may take."""

from unittest import mock

from absl.testing import absltest

from tfscale.data.caches import memory


class MemoryTest(absltest.TestCase):
    def test_budget_is_half_of_what_is_free(self):
        with mock.patch.object(memory, "free_bytes", return_value=1000):
            self.assertEqual(memory.budget(), 500)

    def test_budget_of_this_machine_is_positive(self):
        self.assertGreater(memory.budget(), 0)
        # Where the system does not say how much is free, all counts.
        with mock.patch.object(memory, "free_bytes", return_value=None):
            self.assertGreater(memory.budget(), 0)


if __name__ == "__main__":
    absltest.main()
