import dataclasses
import functools

from absl.testing import absltest
from absl.testing import parameterized

from tests.planner import megatron
from tfscale.planner import search
from tfscale.planner.device import DEVICES
from tfscale.planner.layers import ModelTable
from tfscale.schedules.named_schedules import get_schedule

H100 = DEVICES["H100"]
GPT = megatron.Gpt(4096, 32, 32)


def _table(**options):
    by_ranks = {n: GPT.table(n).by_ranks[n] for n in (1, 2, 4, 8)}
    table = dataclasses.replace(
        GPT.table(1), by_ranks=by_ranks, num_weights=12 * 32 * 4096**2
    )
    return dataclasses.replace(table, **options)


@functools.cache
def _ranked():
    return search.rank(_table(), 16, 64, H100)


class RankTest(parameterized.TestCase):
    def test_all_fit_and_the_fastest_is_first(self):
        found = _ranked()
        times = [p.step_seconds for p in found]
        self.assertEqual(times, sorted(times))
        for p in found:
            self.assertLessEqual(p.num_bytes, H100.usable_memory)
            self.assertEqual(p.settings.num_devices, 16)
            s = p.settings
            # An error, if there is no such schedule.
            get_schedule(
                *(s.schedule, s.pipeline, s.num_microbatches),
                s.stages_per_device,
            )
        # No settings twice.
        self.assertLen({p.settings for p in found}, len(found))

    def test_memory_decides_what_is_there(self):
        # 6 billion weights, 16 bytes each, are no copy for each device.
        found = _ranked()
        self.assertGreater(
            min(
                p.settings.pipeline * p.settings.model
                for p in found
                if p.settings.zero_stage != 3
            ),
            1,
        )

    def test_of_each_mesh_the_best(self):
        found = _ranked()
        best = search.best_of_each_mesh(found)
        self.assertIs(best[0], found[0])
        meshes = [
            (p.settings.data, p.settings.pipeline, p.settings.model)
            for p in best
        ]
        self.assertLen(set(meshes), len(meshes))

    def test_the_frontier_has_what_nothing_is_better_than(self):
        found = _ranked()
        best = search.frontier(found)
        for p in best:
            for other in found:
                self.assertFalse(
                    other.step_seconds < p.step_seconds
                    and other.num_bytes < p.num_bytes
                )

    def test_says_why_one_is_slower(self):
        fast, *_ = _ranked()
        slow = dataclasses.replace(
            fast, seconds={**fast.seconds, "bubble": 10 * fast.step_seconds}
        )
        self.assertStartsWith(search.why_slower(slow, fast), "bubble +")
        self.assertEqual(search.why_slower(fast, slow), "")

    def test_a_model_that_is_not_cut_has_no_stages(self):
        for p in search.rank(_table(can_be_cut=False), 16, 16, H100):
            self.assertEqual(p.settings.pipeline, 1)
            self.assertEqual(p.settings.num_microbatches, 1)
            self.assertFalse(p.settings.recompute)


class BadInputTest(parameterized.TestCase):
    def test_a_batch_that_nothing_divides(self):
        table = ModelTable(
            "whole",
            {1: GPT.table(1).by_ranks[1]},
            1.0,
            can_be_cut=False,
            notes=("It cannot be cut.",),
        )
        with self.assertRaisesRegex(
            ValueError,
            "must divide the batch size. Received: batch_size=30 for 4 "
            "devices, on which this model can have 4 replicas. Use "
            "batch_size=(28 or 32|32 or 28), .*It cannot be cut.",
        ):
            search.rank(table, 4, 30, H100)

    def test_nothing_fits(self):
        with self.assertRaisesRegex(
            ValueError,
            r"must fit into 90 % .* Received: 'gpt' with .*"
            r" and 1 x H100 .*"
            r"The smallest plan \(num_microbatches=64\) needs .* GB: weights ",
        ):
            search.rank(_table(), 1, 64, H100)


if __name__ == "__main__":
    absltest.main()
