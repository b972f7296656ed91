"""One signal is noted, a second one is for the handlers of before."""

import os
import select
import signal
import time

from absl.testing import absltest

from tests import forked_processes
from tfscale.backup.stopping import StopSignals


def term():
    os.kill(os.getpid(), signal.SIGTERM)


def say(text):
    os.write(1, f"{text}\n".encode())  # not what pytest has in its place


class StoppingTest(absltest.TestCase):
    def test_the_second_one_ends_the_process_whatever_it_does(self):
        def work():
            signals = StopSignals([signal.SIGTERM], lambda: False)
            signals.watch()
            term()
            say(f"noted {signals.received}")
            try:
                term()
            finally:
                say("went on")

        status, said = forked_processes.output_of(work)
        self.assertEqual(said, f"noted {int(signal.SIGTERM)}\n")
        self.assertEqual(os.waitstatus_to_exitcode(status), -signal.SIGTERM)

    def test_the_second_one_is_for_the_handler_of_before(self):
        # It ended the process by `os._exit`: no `finally`, no `atexit`.
        def work():
            both = (signal.SIGTERM, signal.SIGINT)
            signal.signal(signal.SIGTERM, lambda *_: say("theirs"))
            # A shell starts what runs in the background without it.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for number in both:
                signals = StopSignals(both, lambda: False)
                signals.watch()
                os.kill(os.getpid(), number)
                say(f"noted {signals.received}")
                try:
                    os.kill(os.getpid(), number)
                except KeyboardInterrupt:
                    say("interrupted")

        status, said = forked_processes.output_of(work)
        numbers = int(signal.SIGTERM), int(signal.SIGINT)
        self.assertEqual(
            (status, said),
            (0, "noted {}\ntheirs\nnoted {}\ninterrupted\n".format(*numbers)),
        )

    def test_handlers_are_put_back_and_get_what_comes_after_the_run(self):
        def work():
            signal.signal(signal.SIGTERM, lambda *_: say("theirs"))
            for is_over in (True, False):
                signals = StopSignals([signal.SIGTERM], lambda o=is_over: o)
                signals.watch()
                if not is_over:
                    signals.restore()
                term()

        status, said = forked_processes.output_of(work)
        self.assertEqual((status, said), (0, "theirs\ntheirs\n"))

    def test_forked_children_have_the_handlers_of_before(self):
        # They could not be ended: a pool of processes waited for ever.
        def work():
            signals = StopSignals([signal.SIGTERM], lambda: False)
            signals.watch()
            read, write = os.pipe()

            def wait():
                os.write(write, b"here")
                while True:  # Python's handlers run between two calls
                    time.sleep(0.01)

            child = forked_processes.fork(wait)
            os.read(read, 4)
            os.kill(child, signal.SIGTERM)
            ended = os.pidfd_open(child)
            say(f"ended {select.select([ended], [], [], 10.0)[0] == [ended]}")
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            say(f"by {-os.waitstatus_to_exitcode(status)}")
            term()
            say(f"noted {signals.received}")

        status, said = forked_processes.output_of(work)
        number = int(signal.SIGTERM)
        self.assertEqual(
            (status, said), (0, f"ended True\nby {number}\nnoted {number}\n")
        )

    def test_one_that_came_too_late_is_for_the_handler_of_before(self):
        def work():
            for handler in (lambda *_: say("theirs"), signal.SIG_DFL):
                signal.signal(signal.SIGTERM, handler)
                signals = StopSignals([signal.SIGTERM], lambda: False)
                signals.watch()
                term()
                signals.pass_on(9)
                say("goes on")

        status, said = forked_processes.output_of(work)
        self.assertEqual(said, "theirs\ngoes on\n")
        self.assertEqual(os.waitstatus_to_exitcode(status), 9)


if __name__ == "__main__":
    absltest.main()
