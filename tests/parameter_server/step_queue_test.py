"""A chief without workers says who is not there; nobody had, for 600 s."""

import threading
import types
from unittest import mock

from absl.testing import absltest

from tests import forked_processes
from tfscale.cluster import Cluster
from tfscale.cluster import ports
from tfscale.parameter_server import step_queue


class _Result:
    """Of a step that waits for a worker."""

    def __init__(self):
        self.is_over = threading.Event()

    def fetch(self):
        self.is_over.wait(30.0)
        return [1.0]

    get = fetch


class StepQueueTest(absltest.TestCase):
    def test_who_is_waited_for_is_said_while_the_step_waits(self):
        addresses = tuple(forked_processes.free_addresses(2))
        with ports.listen(addresses[0]):
            result = _Result()
            strategy = types.SimpleNamespace(
                coordinator=types.SimpleNamespace(
                    schedule=lambda function, args: result
                ),
                cluster=Cluster(
                    {"chief": ("c:1",), "worker": addresses, "ps": ("p:1",)},
                    "chief",
                    0,
                ),
                num_workers=2,
            )

            def warning(text, *args):
                said.append(text % args)
                result.is_over.set()

            said = []
            with (
                mock.patch.object(step_queue, "_SECONDS_WITHOUT_WORDS", 0.05),
                mock.patch.object(step_queue.logging, "warning", warning),
            ):
                steps = step_queue.StepQueue(strategy)
                steps.put(lambda: None)
        self.assertTrue(result.is_over.is_set())
        self.assertLen(said, 1)
        self.assertIn(f"no answer from worker 1 at {addresses[1]}.", said[0])
        self.assertEqual(steps.sums, [1.0])

    def test_steps_under_way_are_none_of_what_begins_after_a_prediction(self):
        """A callback predicts and evaluates: steps of training counted too."""
        result = _Result()
        result.is_over.set()
        strategy = types.SimpleNamespace(
            coordinator=types.SimpleNamespace(
                schedule=lambda function, args: result, join=lambda: None
            ),
            cluster=None,
            num_workers=1,
        )
        steps = step_queue.StepQueue(strategy)
        for _ in range(3):
            steps.put(lambda: None)
        steps.run(lambda batch: None, [0])
        steps.reset()
        steps.put(lambda: None)
        steps.join()
        self.assertEqual(steps.sums, [1.0])


if __name__ == "__main__":
    absltest.main()
