"""What a thread does for a rank is told to those that it calls, for a while."""

import threading

from absl.testing import absltest

from tfscale import rank_context


class RankContextTest(absltest.TestCase):
    def test_within_another_it_adds_to_it_and_ends_with_it(self):
        before = rank_context.current()
        with rank_context.within(reads_shards=True):
            with rank_context.within(gradients_are_partial=True):
                self.assertTrue(rank_context.current().reads_shards)
                self.assertTrue(rank_context.current().gradients_are_partial)
            self.assertFalse(rank_context.current().gradients_are_partial)
            with (
                self.assertRaises(KeyError),
                rank_context.within(reads_shards=False),
            ):
                raise KeyError
            self.assertTrue(rank_context.current().reads_shards)
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

    def test_what_there_is_not_is_refused(self):
        with (
            self.assertRaises(TypeError),
            rank_context.within(reads_shard=True),
        ):
            pass


if __name__ == "__main__":
    absltest.main()
