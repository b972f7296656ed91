"""What workers say of each other, without TensorFlow's part in it."""

import contextlib
import io
import socket
import sys
import threading
import time
from unittest import mock

import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests import forked_processes
from tfscale.cluster import Cluster
from tfscale.cluster import coordination
from tfscale.cluster import failure_detector
from tfscale.cluster.failure_detector import FailureDetector
from tfscale.cluster.rendezvous import Rendezvous


def two():
    """The detectors of two workers."""
    jobs = {"worker": tuple(forked_processes.free_addresses(2))}
    found = {}

    def meet(index):
        cluster = Cluster(jobs, "worker", index)
        place = Rendezvous(cluster, {})
        place.meet(10.0, first=cluster.addresses[0])
        found[index] = FailureDetector(cluster, place)

    other = threading.Thread(target=meet, args=(1,))
    other.start()
    meet(0)
    other.join()
    return found[0], found[1]


class FailureDetectorTest(parameterized.TestCase):
    def test_one_that_has_ended_and_is_waited_for_is_named(self):
        # Where `evaluate` was called by one only, it waited for ever.
        first, second = two()
        first.num_collectives = lambda: 8
        second.num_collectives = lambda: 7
        first.check_all_there()
        second.leave()
        self.assertTrue(second.is_missed.wait(10.0))
        self.assertTrue(first._knows.wait(10.0))
        waiting = coordination.Coordination(2, 0, first.check_all_there)
        with (
            mock.patch.object(coordination, "attributes") as shared,
            self.assertRaisesRegex(
                ConnectionError,
                "worker 1 at .* has ended while others wait for it",
            ),
        ):
            shared.get_key_value.return_value = None
            waiting.check_same("dataset", "64 rows")
        first.leave()

    @parameterized.parameters((7, False), (8, True), (9, True))
    def test_one_that_is_in_another_exchange_is_named(self, count, is_named):
        # Where `evaluate` was called by one only, both waited for ever.
        first, second = two()
        first.num_collectives = lambda: 8  # the last one is that check
        second.num_collectives = lambda: count
        waiting = coordination.Coordination(
            *(2, 0, first.check_all_there),
            lambda worker: first.is_awaited_by(second._cluster.address),
        )
        end = time.monotonic() + (30.0 if is_named else 2.0)

        def value(key, milliseconds):
            time.sleep(0.01)
            if time.monotonic() < end:
                return None
            return shared.put_key_value.call_args[0][1]

        with mock.patch.object(coordination, "attributes") as shared:
            shared.get_key_value.side_effect = value
            if is_named:
                with self.assertRaisesRegex(
                    ValueError, "call of `evaluate` in worker 0, a step"
                ):
                    waiting.check_same("call of `evaluate`", "begins")
            else:
                waiting.check_same("call of `evaluate`", "begins")
        first.leave()
        second.leave()

    @parameterized.parameters(0, 8)
    def test_exchanges_with_one_that_is_lost_are_aborted(self, count):
        # TensorFlow waited for it for up to seven seconds.
        abort = self.enter_context(
            mock.patch.object(failure_detector.attributes, "abort_collectives")
        )
        first, second = two()
        first.num_collectives = lambda: count
        with self.assertLogs(level="ERROR") as logs:
            first._note(lost := second._cluster.address)
        self.assertIn(f"worker 1 at {lost} is gone", "\n".join(logs.output))
        self.assertEqual(abort.call_count, count > 0)
        first.leave()
        second.leave()

    def test_all_may_end_after_the_same_meetings(self):
        first, second = two()
        second.leave()
        self.assertFalse(second.is_missed.wait(0.5))
        first.check_all_there()
        first.leave()

    @parameterized.parameters(
        (
            1,
            tf.errors.UnavailableError,
            "Error reported from /job:worker/task:1: The following tasks are "
            "unhealthy (stopped sending heartbeats):\n"
            "/job:worker/replica:0/task:1\nThe tasks have crashed. node "
            "/job:worker/replica:0/task:0/device:CPU:0",
        ),
        (
            0,
            tf.errors.DeadlineExceededError,
            "Deadline Exceeded\nRPC: /tensorflow.CoordinationService/Heartbeat",
        ),
    )
    def test_one_that_stands_still_is_named_by_the_others(
        self, still, kind, text
    ):
        # It was some 60 lines of TensorFlow's.
        both = two()
        second, first = both[still], both[1 - still]
        error = kind(None, None, f"Collective ops is aborted by: {text}")
        with (
            mock.patch.object(failure_detector, "_SECONDS_TO_KNOW", 0.01),
            self.assertRaisesRegex(
                ConnectionError, rf"worker {still} at \S+ does not answer"
            ) as raised,
            first.naming_lost(),
        ):
            raise error
        self.assertTrue(raised.exception.__suppress_context__)
        # It hears so when it goes on.
        self.assertTrue(second._knows.wait(10.0))
        with self.assertRaisesRegex(
            ConnectionError, rf"worker {still} at \S+ \(this one\) stood still"
        ):
            second.check_all_there()
        for one in (first, second):
            one.leave()

    def test_a_program_that_ends_by_a_loss_names_it_in_its_last_line(self):
        # In a loop of a user's own nothing else turns TensorFlow's error.
        first, second = two()
        for one in (first, second):
            for connection in one._rendezvous.connections.values():
                self.addCleanup(connection.close)
        for connection in second._rendezvous.connections.values():
            connection.shutdown(socket.SHUT_RDWR)
        self.assertTrue(first._knows.wait(10.0))
        of_loss = tf.errors.UnavailableError(None, None, "Socket closed")
        try:
            first.check_all_there()
        except ConnectionError as error:
            of_words = error
        for error, expected in (
            (of_loss, r"^All workers .*worker 1 at .* is gone.*\n$"),
            (of_words, "^$"),  # Python has printed it
            (ConnectionError("of something else"), "^$"),
        ):
            said = io.StringIO()
            with (
                contextlib.redirect_stderr(said),
                mock.patch.object(sys, "last_value", error, create=True),
            ):
                first.leave()
            self.assertRegex(said.getvalue(), expected)

    def test_other_errors_stay_as_they_are(self):
        detectors = two()
        for error in (
            tf.errors.InvalidArgumentError(None, None, "shapes"),
            tf.errors.OutOfRangeError(None, None, "end"),
            KeyError("x"),
        ):
            with (
                self.assertRaises(type(error)) as raised,
                detectors[0].naming_lost(),
            ):
                raise error
            self.assertIs(raised.exception, error)
        for one in detectors:
            one.leave()

    def test_tensors_that_do_not_belong_together_are_explained(self):
        # It was a traceback of some 40 lines of TensorFlow's.
        detectors = two()
        with (
            self.assertRaisesRegex(ValueError, "the same things in the same"),
            detectors[0].naming_lost(),
        ):
            raise tf.errors.InternalError(
                None,
                None,
                "Collective instance 32 expected type 0 and data_type 1",
            )
        for one in detectors:
            one.leave()

    def test_one_that_does_not_answer_while_all_join_is_named(self):
        # TensorFlow waited for it for ever, whatever the timeout.
        first, second = two()
        self.assertEmpty(first.silent())
        late = tf.errors.DeadlineExceededError(None, None, "Barrier timed out.")
        with (
            mock.patch.object(failure_detector, "_SECONDS_TO_KNOW", 0.1),
            self.assertRaisesRegex(
                ConnectionError,
                rf"after 20 s, at {first._cluster.address}, .*Barrier timed",
            ),
            first.joining(20.0),
        ):
            raise late
        still = second._cluster.address
        with (
            mock.patch.object(first, "silent", lambda: [still]),
            self.assertRaisesRegex(
                ConnectionError, "worker 1 at .* does not answer any more"
            ),
            first.joining(20.0),
        ):
            raise late
        self.assertTrue(second._knows.wait(10.0))
        for one in (first, second):
            one.leave()


if __name__ == "__main__":
    absltest.main()
