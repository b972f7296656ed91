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

    def test_the_limit_of_a_job_counts_and_pages_of_files_do_not(self):
        # Slurm limits a group below that of the machine, which was not seen: a
        # cache took half of the machine's memory, and the job was killed. What
        # was read of files counted as used: a cache found no room.
        for kind, limit, use, of_files in (
            ("", "memory.max", "memory.current", "inactive_file"),
            (
                "memory/",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            ),
        ):
            folder = self.create_tempdir()
            groups = folder.create_file(
                "groups", f"5:pids:/\n4:{kind.strip('/')}:/job_1/step_0\n"
            )
            for path, most, used in (
                (f"{kind}", 900, 300),
                (f"{kind}job_1/", 600, 300),
                (f"{kind}job_1/step_0/", "max", 100),
            ):
                folder.create_file(path + limit, f"{most}\n")
                folder.create_file(path + use, f"{used}\n")
                folder.create_file(
                    path + "memory.stat", f"anon 7\n{of_files} 50\n"
                )
            with mock.patch.object(
                free_memory, "_GROUPS_OF_PROCESS", groups.full_path
            ):
                found = free_memory.free_bytes(folder.full_path, 1000)
            self.assertEqual(found, 350)

    def test_the_address_space_counts_and_nothing_is_less_than_zero(self):
        with mock.patch.object(resource, "getrlimit", return_value=(1, 1)):
            self.assertEqual(free_memory.free_bytes(available=1000), 0)

    def test_a_system_that_does_not_say_it(self):
        with mock.patch.object(free_memory, "_kib", return_value=None):
            self.assertIsNone(free_memory.free_bytes())


if __name__ == "__main__":
    absltest.main()
