"""What a thread knows of its step is told to those that it calls."""

import dataclasses
import threading

from absl.testing import absltest

from tfscale.context import step_context


class StepTest(absltest.TestCase):
    def test_within_another_it_adds_to_it_and_ends_with_it(self):
        before = step_context.current().ranks
        with step_context.within_ranks(reads_shards=True):
            with step_context.within_ranks(gradients_are_partial=True):
                self.assertTrue(step_context.current().ranks.reads_shards)
                self.assertTrue(
                    step_context.current().ranks.gradients_are_partial
                )
            self.assertFalse(step_context.current().ranks.gradients_are_partial)
            with (
                self.assertRaises(KeyError),
                step_context.within_ranks(reads_shards=False),
            ):
                raise KeyError
            self.assertTrue(step_context.current().ranks.reads_shards)
        self.assertIs(step_context.current().ranks, before)

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
            with step_context.within_ranks(replica=1):
                self.assertEqual(
                    step_context.current().batch_shard, "a microbatch"
                )
                self.assertEqual(step_context.current().ranks.replica, 1)
            self.assertIsNone(step_context.current().ranks.replica)

    def test_an_unknown_name_is_refused(self):
        for within in (step_context.within, step_context.within_ranks):
            with self.assertRaises(TypeError), within(reads_shard=True):
                pass


if __name__ == "__main__":
    absltest.main()
