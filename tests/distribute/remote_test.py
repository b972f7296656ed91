"""One coordinator and two servers, real processes: all rows in one set of them.

What is checked, and where, is in remote_rows.py.
"""

import contextlib
import io
import json
import os
import signal
import socket
import sys
import time

from absl.testing import absltest

from tests.source_files import REPOSITORY
from tfscale.cluster import Cluster
from tfscale.launch.child import Child

_SECONDS = 200.0


def _free_addresses(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("localhost", 0))
        return tuple(f"localhost:{one.getsockname()[1]}" for one in sockets)


def _start(cluster, index, arguments):
    environ = {
        **os.environ,
        "KERAS_BACKEND": "tensorflow",
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_CONFIG": Cluster(cluster, "worker", index).to_tf_config(),
        "TFSCALE_VIRTUAL_DEVICES": "2",
    }
    module = "tests.distribute.remote_rows"
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    return Child(f"worker {index}", command, environ)


class RemoteTest(absltest.TestCase):
    def test_rows(self):
        folder = self.create_tempdir().full_path
        results, pid = (os.path.join(folder, n) for n in ("results", "pid"))
        cluster = {"worker": _free_addresses(3)}
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            children = [_start(cluster, i, [results, pid]) for i in range(3)]
            end = time.monotonic() + _SECONDS
            while time.monotonic() < end and any(
                child.exit_code is None for child in children
            ):
                time.sleep(0.05)
            codes = [child.exit_code for child in children]
            for child in children:
                child.send(signal.SIGKILL)
                child.wait_for_output()
        output = output.getvalue()
        rows = []
        if os.path.exists(results):
            with open(results) as file:
                rows = [json.loads(line) for line in file]
        for name, failed, seconds in rows:
            with self.subTest(name, seconds=seconds):
                self.assertIsNone(failed, failed)
        # The coordinator ended, so did the server that was left, by itself.
        self.assertEqual(codes, [0, 0, -signal.SIGKILL], output)
        self.assertEqual([name for name, *_ in rows][-1:], ["lost_server"])
        self.assertRegex(
            output,
            "A server must stay until its coordinator ends. Received: "
            f"{cluster['worker'][2]} has ended",
        )


if __name__ == "__main__":
    absltest.main()
