"""What a thread knows of its step is told to those that it calls."""

import dataclasses
import threading

from absl.testing import absltest

from tfscale.context import rank_state
from tfscale.context import step_context


class StepTest(absltest.TestCase):
    def test_within_another_it_adds_to_it_and_ends_with_it(self):
        before = rank_state.current()
        with rank_state.within(reads_shards=True):
            with rank_state.within(gradients_are_partial=True):
                self.assertTrue(rank_state.current().reads_shards)
                self.assertTrue(rank_state.current().gradients_are_partial)
            self.assertFalse(rank_state.current().gradients_are_partial)
            with (
                self.assertRaises(KeyError),
                rank_state.within(reads_shards=False),
            ):
                raise KeyError
            self.assertTrue(rank_state.current().reads_shards)
        self.assertIs(rank_state.current(), before)

    def test_another_thread_has_its_own(self):
        seen = []
        with step_context.within(batch_shard="a microbatch"):
            thread = threading.Thread(
                target=lambda: seen.append(step_context.current())
            )
            thread.start()
            thread.join()
        self.assertEqual(seen, [step_context.Step()])

    def test_a_thread_keeps_one_step_of_few_fields(self):
        fields = dataclasses.fields(step_context.Step)
        self.assertLessEqual(len(fields), 6)
        with step_context.within(batch_shard="a microbatch"):
            with rank_state.within(replica=1):
                self.assertEqual(
                    step_context.current().batch_shard, "a microbatch"
                )
                self.assertEqual(rank_state.current().replica, 1)
            self.assertIsNone(rank_state.current().replica)

    def test_an_unknown_name_is_refused(self):
        for within in (step_context.within, rank_state.within):
            with self.assertRaises(TypeError), within(reads_shard=True):
                pass


if __name__ == "__main__":
    absltest.main()
