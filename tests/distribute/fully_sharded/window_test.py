"""The window of gathered weights: never more bytes alive than it holds."""

import random

from absl.testing import absltest

from tfscale.distribute.fully_sharded.window import Window


class WindowTest(absltest.TestCase):
    def test_the_drawing_of_the_module(self):
        window, left = Window(2), []
        for name in "abcdcba":
            kept = name in window
            left.append((name, kept, "".join(window.add(name, 1))))
        self.assertEqual(
            left,
            [
                ("a", False, ""),
                ("b", False, ""),
                ("c", False, "a"),
                ("d", False, "b"),
                ("c", True, ""),
                ("b", False, "d"),
                ("a", False, "c"),
            ],
        )

    def test_what_is_larger_than_the_window_is_alone_in_it(self):
        window = Window(2)
        window.add("a", 1)
        self.assertEqual(window.add("b", 5), ["a"])
        self.assertEqual(window.add("c", 1), ["b"])

    def test_no_more_is_alive_than_fits_whatever_the_order(self):
        chance = random.Random(0)
        for _ in range(300):
            sizes = [chance.randint(1, 9) for _ in range(chance.randint(1, 12))]
            limit = sum(sorted(sizes)[-2:])
            window, alive, seen = Window(limit), {}, []
            for _ in range(40):
                name = chance.randrange(len(sizes))
                was_there = name in window
                self.assertEqual(was_there, name in alive)
                for other in window.add(name, sizes[name]):
                    self.assertIn(other, alive)
                    del alive[other]
                alive[name] = sizes[name]
                seen.append(name)
                self.assertLessEqual(sum(alive.values()), limit)
                # The newest is always there, and the one before it, too: two
                # of the largest fit.
                if len(seen) > 1:
                    self.assertIn(seen[-2], alive)


if __name__ == "__main__":
    absltest.main()
