"""What a thread does for a rank is told to those that it calls, for a while."""

import dataclasses
import threading

from absl.testing import absltest

from tfscale import rank_context


class RankContextTest(absltest.TestCase):
    def test_within_another_it_adds_to_it_and_ends_with_it(self):
        before = rank_context.current()
        with rank_context.within(reads_shards=True):
            with rank_context.within(gradients_are_partial=True):
                self.assertTrue(rank_context.current().shards.reads_shards)
                self.assertTrue(
                    rank_context.current().shards.gradients_are_partial
                )
            self.assertFalse(
                rank_context.current().shards.gradients_are_partial
            )
            with (
                self.assertRaises(KeyError),
                rank_context.within(reads_shards=False),
            ):
                raise KeyError
            self.assertTrue(rank_context.current().shards.reads_shards)
        self.assertIs(rank_context.current(), before)

    def test_another_thread_has_its_own(self):
        seen = []
        with rank_context.within(reads_shards=True):
            thread = threading.Thread(
                target=lambda: seen.append(rank_context.current())
            )
            thread.start()
            thread.join()
        self.assertEqual(seen, [rank_context.RankContext()])

    def test_a_thread_keeps_a_few_groups(self):
        fields = dataclasses.fields(rank_context.RankContext)
        self.assertLessEqual(len(fields), 6)
        step = rank_context.Step(part="a microbatch", replica=1)
        with rank_context.within(step=step, reads_shards=True):
            with rank_context.within(replica=None):
                self.assertEqual(rank_context.current().step.part, step.part)
                self.assertIsNone(rank_context.current().step.replica)
            self.assertIs(rank_context.current().step, step)

    def test_what_there_is_not_is_refused(self):
        with (
            self.assertRaises(TypeError),
            rank_context.within(reads_shard=True),
        ):
            pass


if __name__ == "__main__":
    absltest.main()
