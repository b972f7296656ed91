"""One signal is noted, a second one ends the process at once."""

import os
import signal

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
        code = os.waitstatus_to_exitcode(status)
        self.assertEqual(code, 128 + signal.SIGTERM)

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


if __name__ == "__main__":
    absltest.main()
