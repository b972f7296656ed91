"""One coordinator and two servers, real processes: all rows in one set of them.

What is checked, and where, is in remote_rows.py.
"""

import contextlib
import io
import json
import os
import signal
import time

import pytest
from absl.testing import absltest
from absl.testing import parameterized

from tests import forked_python
from tests.mesh import remote_rows
from tests.source_files import REPOSITORY
from tfscale.launch.child import Child
from tfscale.launch.warden import Warden

_SECONDS = 300.0


class RemoteTest(parameterized.TestCase):
    @parameterized.parameters(remote_rows.ALWAYS, remote_rows.CROSSED)
    @pytest.mark.crossing(every=2)
    def test_rows(self, *expected_rows):
        results = self.create_tempfile().full_path
        module = "tests.mesh.remote_rows"
        names = [row.__name__ for row in expected_rows]
        command = [forked_python.executable(), "-m", module, results, *names]
        environ = {
            **os.environ,
            "KERAS_BACKEND": "tensorflow",
            "PYTHONPATH": REPOSITORY,
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            warden = Warden()
            self.addCleanup(warden.end)
            child = Child("all", command, environ, warden)
            end = time.monotonic() + _SECONDS
            while child.exit_code is None and time.monotonic() < end:
                time.sleep(0.05)
            code = child.exit_code
            child.send(signal.SIGKILL)
            child.wait_for_output()
        output = output.getvalue()
        with open(results) as file:
            rows = [json.loads(line) for line in file]
        self.assertEqual(code, 0, output)
        # The server that was left ended by itself, and well.
        *rows, (_, exit_codes, _) = rows
        self.assertEqual(exit_codes, [0, -signal.SIGKILL, 0], output)
        self.assertEqual([name for name, _, _ in rows], names)
        for name, failed, seconds in rows:
            with self.subTest(name, seconds=seconds):
                self.assertIsNone(failed, failed)
        self.assertRegex(
            output,
            r"servers \S+ (\S+)\n(.*\n)*.*A server must run until its "
            r"coordinator ends. Received: \1 has ended",
        )


if __name__ == "__main__":
    absltest.main()
