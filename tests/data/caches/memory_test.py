"""How much memory a cache may take."""

import os

from absl.testing import absltest

from tfscale.data.caches import memory


class MemoryTest(absltest.TestCase):
    def _cgroup(self, files):
        folder = self.create_tempdir()
        for name, text in files.items():
            path = os.path.join(folder, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w") as file:
                file.write(text)
        return folder.full_path

    def test_budget_is_half_of_what_is_free(self):
        free = self._cgroup({"memory.max": "max", "memory.current": "5"})
        self.assertEqual(memory.budget(cgroup=free, available=1000), 500)

    def test_budget_respects_both_versions_of_cgroups(self):
        two = self._cgroup({"memory.max": "600", "memory.current": "200"})
        self.assertEqual(memory.budget(cgroup=two, available=1000), 200)
        one = self._cgroup(
            {
                "memory/memory.limit_in_bytes": "300",
                "memory/memory.usage_in_bytes": "100",
            }
        )
        self.assertEqual(memory.budget(cgroup=one, available=1000), 100)

    def test_budget_of_this_machine_is_positive(self):
        self.assertGreater(memory.budget(), 0)


if __name__ == "__main__":
    absltest.main()
