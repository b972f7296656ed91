"""With "auto", saves take no more than their share, whatever they cost."""

from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from tfscale.backup import report
from tfscale.backup import schedule


class Clock:
    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def time(self):
        return self.now


class SaveScheduleTest(parameterized.TestCase):
    def train(self, steps, seconds, step=0.01):
        """When saves that are complete after so many seconds began."""
        clock, saved, ends_at = Clock(), [], None
        with mock.patch.object(schedule, "time", clock):
            found = schedule.SaveSchedule("auto", 0.035)
            for _ in range(steps):
                if ends_at is not None and clock.now >= ends_at:
                    now, clock.now = clock.now, ends_at
                    found.save_ended()
                    clock.now, ends_at = now, None
                if found.is_due(is_first=False):
                    self.assertIsNone(ends_at)  # one at a time
                    found.save_begins()
                    saved.append(clock.now)
                    ends_at = clock.now + seconds
                clock.now += step
                found.steps_ended(1)
        return saved

    @parameterized.parameters(0.005, 0.1, 2.0)
    def test_all_saves_together_take_their_share_and_no_more(self, seconds):
        steps = 60_000
        saved = self.train(steps, seconds, step=0.005)
        share = len(saved) * seconds / (steps * 0.005)
        self.assertLessEqual(share, 0.035)
        if seconds < 1.0:
            self.assertGreater(share, 0.02)

    def test_the_first_one_is_due_after_a_minute_and_the_next_by_its_cost(self):
        saved = self.train(20_000, 2.0)
        self.assertBetween(saved[0], 60.0, 60.02)
        self.assertBetween(saved[1] - saved[0], 2.0 / 0.035, 2.1 / 0.035)

    def test_saves_that_cost_nothing_are_made_at_each_step(self):
        self.assertBetween(len(self.train(6_100, 0.0)), 99, 100)

    def test_without_a_step_there_is_nothing_to_save(self):
        clock = Clock()
        with mock.patch.object(schedule, "time", clock):
            found = schedule.SaveSchedule("auto", 0.035)
            clock.now = 100.0
            self.assertFalse(found.is_due(is_first=True))
            found.steps_ended(1)
            self.assertTrue(found.is_due(is_first=True))

    @parameterized.parameters(
        ("epoch", [True, False, False, False]),
        (2, [False, True, False, True]),
    )
    def test_by_epochs_or_steps(self, save_freq, expected):
        found, due = schedule.SaveSchedule(save_freq, 0.035), []
        for step in range(4):
            found.steps_ended(1)
            due.append(found.is_due(is_first=step == 0))
            if due[-1]:
                found.save_begins()
        self.assertEqual(due, expected)


class ReportTest(parameterized.TestCase):
    def test_what_is_waited_for_after_a_step_is_useful_until_an_epoch_ends(
        self,
    ):
        """A step on an accelerator returns at once: others wait for it."""
        clock = Clock()
        with mock.patch.object(report, "time", clock):
            found = report.Report(None)
            for number, is_last in enumerate((False, True)):
                found.step_begins()
                clock.now += 1.0
                found.step_ended(1, number + 1)
                clock.now += 9.0  # then validation
                found.step_is_over(is_last)
            self.assertEqual(found.state["useful_seconds"], 11.0)
            self.assertEqual(found.seconds_per_step, 1.0)  # one traces
            self.assertIn("goodput 55.0%", found.text())


if __name__ == "__main__":
    absltest.main()
