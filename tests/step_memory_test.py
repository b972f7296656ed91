import math

from absl.testing import absltest
from absl.testing import parameterized

from tfscale import step_memory


class WholeStepTest(parameterized.TestCase):
    def peak(self, num_replicas=1, **layers):
        options = dict(
            kept=[1, 1, 1],
            working=[2, 2, 2],
            gradients=[1, 1, 1],
            updates=[3, 3, 3],
        )
        return step_memory.whole_step_peak(
            **{**options, **layers}, num_replicas=num_replicas
        )

    def test_activations_and_gradients_do_not_add_up(self):
        # All activations, before the first gradient; nothing waits.
        found = self.peak(kept=[100, 100, 100], updates=[3, 3, 3])
        self.assertEqual(tuple(found), (300, 0, 2))
        # All gradients, after the last activation.
        found = self.peak(num_replicas=math.inf, gradients=[100, 100, 100])
        self.assertEqual(tuple(found), (0, 300, 3))

    @parameterized.parameters((1, 0), (2, 0.5), (4, 0.75), (math.inf, 1))
    def test_gradients_wait_for_the_last_replica(self, replicas, part):
        found = self.peak(replicas, gradients=[0, 40, 40], kept=[9, 0, 0])
        self.assertEqual(tuple(found), (9, part * 80, 2 + 3))

    def test_a_weight_is_updated_while_a_backward_runs(self):
        # Of the layers behind it, that with most; the first is the last.
        for updates, working in (([0, 0, 7], 9), ([7, 0, 0], 7)):
            found = self.peak(kept=[0, 0, 0], updates=updates)
            self.assertEqual(sum(found), working)


class MicrobatchesTest(parameterized.TestCase):
    @parameterized.parameters((10, 2, 3, 12), (1, 2, 30, 30))
    def test_updates_run_when_no_activations_are_there(self, *case):
        *given, peak = case
        self.assertEqual(step_memory.microbatch_peak(*given), peak)

    @parameterized.parameters(
        (10, 4, False, 10, 0), (10, 4, True, 4, 6), (3, 4, True, 3, 0)
    )
    def test_recomputation_holds_inputs(self, kept, inputs, recompute, *found):
        self.assertEqual(
            step_memory.held_bytes(kept, inputs, recompute), tuple(found)
        )

    # The sum and two results; of shards, and the value that is gathered.
    @parameterized.parameters((1, True, 12), (2, True, 10), (2, False, 6))
    def test_bytes_of_an_update(self, num_shards, gathers, expected):
        found = step_memory.update_bytes(4, num_shards, gathers)
        self.assertEqual(found, expected)


if __name__ == "__main__":
    absltest.main()
