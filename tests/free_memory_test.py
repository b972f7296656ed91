"""How much memory of the host a process may still take."""

import resource
from unittest import mock

from absl.testing import absltest

from tfscale import free_memory


class FreeMemoryTest(absltest.TestCase):
    def test_of_this_machine(self):
        self.assertGreater(free_memory.free_bytes(), 0)

    def test_the_limit_of_a_group_counts(self):
        folder = self.create_tempdir()
        folder.create_file("memory.max", "600")
        folder.create_file("memory.current", "200")
        self.assertEqual(free_memory.free_bytes(folder.full_path, 1000), 400)

    def test_the_address_space_counts_and_nothing_is_less_than_zero(self):
        with mock.patch.object(resource, "getrlimit", return_value=(1, 1)):
            self.assertEqual(free_memory.free_bytes(available=1000), 0)

    def test_a_system_that_does_not_say_it(self):
        with mock.patch.object(free_memory, "_kib", return_value=None):
            self.assertIsNone(free_memory.free_bytes())


if __name__ == "__main__":
    absltest.main()
