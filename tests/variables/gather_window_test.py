"""The window of gathered weights: never more bytes alive than it holds."""

import random

from absl.testing import absltest

from tfscale.variables.gather_window import Need
from tfscale.variables.gather_window import Window
from tfscale.variables.gather_window import plan
from tfscale.variables.gather_window import stays


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


def needs_of_a_step(chance):
    """A random step: weights of any size, used in any order, often again."""
    sizes = [chance.randint(1, 9) for _ in range(chance.randint(1, 10))]
    forward = [Need(name, size, False) for name, size in enumerate(sizes)]
    backward = [need._replace(is_backward=True) for need in forward[::-1]]
    for _ in range(chance.randint(0, 8)):
        backward.insert(
            chance.randint(0, len(backward)), chance.choice(backward)
        )
    return forward + backward, sum(sorted(sizes)[-2:])


class PlanTest(absltest.TestCase):
    def test_a_gather_waits_for_what_comes_before_it(self):
        """So there is no cycle, whatever the step."""
        chance = random.Random(1)
        for _ in range(300):
            needs, limit = needs_of_a_step(chance)
            waits = plan(needs, limit)
            self.assertLen(waits, len(needs))
            for index, (need, found) in enumerate(zip(needs, waits)):
                if found is None:
                    self.assertTrue(need.is_backward)
                else:
                    self.assertTrue(all(other < index for other in found))

    def test_no_order_that_waits_allow_has_more_alive(self):
        """Gathers run as early as they may, and uses at any time."""
        chance = random.Random(2)
        for _ in range(300):
            needs, limit = needs_of_a_step(chance)
            waits = plan(needs, limit)
            # By which gather each need has its weight.
            gather_of, latest = [], {}
            for index, need in enumerate(needs):
                if waits[index] is not None:
                    latest[need.gather] = index
                gather_of.append(latest[need.gather])
            gathers = [i for i, found in enumerate(waits) if found is not None]
            gathered, used = set(), set()
            while len(used) < len(needs):
                ready = [
                    ("use", i)
                    for i in range(len(needs))
                    if gather_of[i] in gathered and i not in used
                ]
                if len(gathered) < len(gathers):
                    following = gathers[len(gathered)]
                    if used.issuperset(waits[following]):
                        ready.append(("gather", following))
                kind, index = chance.choice(
                    [r for r in ready if r[0] == "gather"] or ready
                )
                (gathered if kind == "gather" else used).add(index)
                alive = sum(
                    needs[g].num_bytes
                    for g in gathered
                    if any(
                        gather_of[i] == g and i not in used
                        for i in range(len(needs))
                    )
                )
                self.assertLessEqual(alive, limit)


class StaysTest(absltest.TestCase):
    def test_what_is_used_last_is_gathered_once(self):
        self.assertEqual(
            stays({"a": 1, "b": 1, "c": 1, "d": 1}, limit=2),
            [
                ("a", 0, 2),
                ("b", 1, 3),
                ("c", 2, 7),
                ("d", 3, 6),
                ("b", 6, 8),
                ("a", 7, 8),
            ],
        )

    def test_of_no_weight_there_is_none(self):
        self.assertEqual(stays({}, limit=0), [])


if __name__ == "__main__":
    absltest.main()
