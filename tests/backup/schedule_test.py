"""With "auto", saves take no more than their share, whatever they cost."""

import random
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from tfscale.backup import schedule


class Clock:
    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


class SaveScheduleTest(parameterized.TestCase):
    def train(
        self, steps, stall, slower=0.0, written_in=0, num_bytes=0, early=0.01
    ):
        """Steps of 10 ms, the first one of 5 s; at which ones it saved.

        The nine behind the first one take `early` seconds.
        """
        clock, saved = Clock(), []
        with mock.patch.object(schedule, "time", clock):
            found = schedule.SaveSchedule("auto", 0.035)
            found.expect(num_bytes)
            for step in range(steps):
                found.step_is_over(is_last=False)
                if found.is_due(is_first=False):
                    clock.now += stall
                    found.saved(stall)
                    saved.append(step)
                is_writing = bool(saved) and step - saved[-1] < written_in
                found.step_begins(is_writing)
                # Most of it is waited for behind the step.
                clock.now += 0.001
                found.step_ended(1)
                usual = early if 0 < step < 10 else 0.01
                clock.now += usual - 0.001 + slower * is_writing
                clock.now += 5.0 * (step == 0)
        return saved

    @parameterized.parameters(0.0005, 0.01, 0.2)
    def test_all_saves_together_take_their_share_and_no_more(self, stall):
        steps = 20_000
        saved = self.train(steps, stall)
        share = len(saved) * stall / (steps * 0.01)
        self.assertLessEqual(share, 0.035)
        self.assertGreater(share, 0.03)
        self.assertEqual(saved[0], 10)

    def test_steps_that_are_longer_while_it_is_written_count(self):
        """What stands still for a millisecond may slow a hundred steps down."""
        steps = 20_000
        saved = self.train(steps, 0.001, slower=0.005, written_in=20)
        share = len(saved) * (0.001 + 20 * 0.005) / (steps * 0.01)
        self.assertBetween(share, 0.03, 0.036)

    def test_steps_that_were_long_at_the_beginning_hide_no_cost(self):
        """Measured by their mean, slower steps cost nothing for thousands."""
        saved = self.train(2_000, 0.0, slower=0.005, written_in=20, early=0.1)
        for number, step in enumerate(saved[1:], 1):
            spent = number * 20 * 0.005
            self.assertLessEqual(spent, 0.035 * (0.01 * step + 0.9))

    def test_what_is_waited_for_behind_a_step_is_useful_until_an_epoch_ends(
        self,
    ):
        """A step on an accelerator returns at once: others wait for it."""
        clock = Clock()
        with mock.patch.object(schedule, "time", clock):
            found = schedule.SaveSchedule("auto", 0.035)
            for is_last in (False, True):
                found.step_begins(is_writing=False)
                clock.now += 1.0
                found.step_ended(1)
                clock.now += 9.0  # then validation
                found.step_is_over(is_last)
        self.assertEqual(found.useful_seconds, 11.0)

    def test_others_who_disturb_the_clock_do_not_make_it_more_than_its_share(
        self,
    ):
        """By what it truly cost, which the schedule is not told."""
        draw = random.Random(0)
        clock, cost = Clock(), 0.0
        with mock.patch.object(schedule, "time", clock):
            found = schedule.SaveSchedule("auto", 0.035)
            found.expect(0)
            left = saves = 0
            for _ in range(10_000):
                found.step_is_over(is_last=False)
                if found.is_due(is_first=False):
                    clock.now += 0.002
                    found.saved(0.002)
                    cost += 0.002
                    left, saves = 30, saves + 1
                found.step_begins(is_writing=left > 0)
                # One in ten has a third more; a save costs a fifth.
                usual = 0.02 * (1.3 if draw.random() < 0.1 else 1.0)
                usual *= draw.uniform(0.95, 1.05)
                clock.now += usual + 0.004 * (left > 0)
                cost += 0.004 * (left > 0)
                left -= 1
                found.step_ended(1)
        self.assertGreater(saves, 40)
        self.assertBetween(cost / (clock.now - cost), 0.02, 0.035)

    def test_the_first_one_waits_until_it_takes_its_share_too(self):
        """It came after ten steps: half the time of a short run."""
        saved = self.train(10_000, 1.0, num_bytes=100_000_000)
        self.assertBetween(saved[0] * 0.01, 1.0 / 0.035, 1.02 / 0.035)

    def test_what_costs_nothing_is_done_at_each_step(self):
        self.assertLen(self.train(100, 0.0), 90)


if __name__ == "__main__":
    absltest.main()
