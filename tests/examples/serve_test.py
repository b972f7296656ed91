"""The example that serves, on a real Ray."""

import asyncio
import base64
import contextlib
import http.client
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import unittest
from concurrent import futures
from unittest import mock

import keras
import numpy as np
from absl.testing import absltest

import tfscale
from examples import serve
from tests import forked_python
from tests.source_files import REPOSITORY

SECONDS = 300.0
EXPORT = """
import json, sys
import keras
import numpy as np
import tfscale

tfscale.use_virtual_devices(2)
with tfscale.MeshStrategy(tfscale.device_mesh(pipeline=2)).scope():
    keras.utils.set_random_seed(0)
    tokens = keras.Input((3,), dtype="int32", name="tokens")
    x = keras.layers.Flatten()(keras.layers.Embedding(50, 4)(tokens))
    for _ in range(3):
        x = keras.layers.Dense(8, "tanh")(x)
    model = keras.Model(tokens, x)
    model = tfscale.PipelineModel(model, num_microbatches=1)
    model.compile()
tfscale.export(model, sys.argv[1])
x = np.arange(48).reshape(16, 3)
print(json.dumps(model.predict(x, verbose=0).tolist()))
"""


def post(port, body):
    """The status and the content of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/models/model:predict", json.dumps(body))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


@contextlib.contextmanager
def server(log, *arguments):
    """The port at which the example serves, once it does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "examples.serve", f"--port={port}"),
                *arguments,
            ],
            cwd=REPOSITORY,
            env={
                **os.environ,
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_worker_niceness": "0",  # other tests would go before
            },
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        wait_for(lambda: is_available(port), process, log)
        yield port, process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def is_available(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with contextlib.closing(connection), contextlib.suppress(OSError):
        connection.request("GET", "/v1/models/model")
        return b"AVAILABLE" in connection.getresponse().read()
    return False


def wait_for(condition, process, log):
    """Returns when a condition holds; an error if the server ends before."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            with open(log) as file:
                raise AssertionError(f"It has ended, or hangs: {file.read()}")
        time.sleep(0.2)


class ServeTest(absltest.TestCase):
    @unittest.skipUnless(importlib.util.find_spec("ray"), "needs Ray Serve")
    def test_each_request_of_a_batch_has_an_answer_or_error_of_its_own(self):
        folder = self.create_tempdir().full_path
        path, log = (os.path.join(folder, name) for name in ("1", "log"))
        exported = forked_python.run(["-c", EXPORT, path], REPOSITORY)
        self.assertEqual(exported.returncode, 0, exported.stderr)
        expected = json.loads(exported.stdout.splitlines()[-1])
        rows = np.arange(48).reshape(16, 3).tolist()
        with server(
            log,
            *(
                f"--model_path={path}",
                "--devices_per_replica=2",
                "--batches_in_flight=2",
            ),
            *("--batch_timeout=0.5", "--max_replicas=2", "--scaling_delay=0.1"),
            "--ongoing_requests=1",
        ) as (port, process):
            bodies = [{"instances": [row]} for row in rows]
            bodies[3] = {"instances": [[0, 1, 99]]}  # no such token
            bodies[5] = {"instances": [[0, 1]]}
            bodies[7] = {"inputs": {"tokens": rows[7:9]}}
            with futures.ThreadPoolExecutor(16) as pool:
                answers = list(pool.map(lambda x: post(port, x), bodies))
            self.assertEqual(answers[3][0], 400)
            self.assertIn("99 is not in", answers[3][1]["error"])
            self.assertEqual(answers[5][0], 400)
            self.assertIn("has the shape (None, 3)", answers[5][1]["error"])
            self.assertEqual(answers[7][0], 200)
            np.testing.assert_allclose(
                answers[7][1]["outputs"], expected[7:9], rtol=1e-6, atol=1e-6
            )
            for number in {*range(16)} - {3, 5, 7}:
                status, content = answers[number]
                self.assertEqual(status, 200, content)
                np.testing.assert_allclose(
                    content["predictions"],
                    expected[number : number + 1],
                    rtol=1e-6,
                    atol=1e-6,
                )
            self.assertReplicasFollowRequests(port, process, log)

    def assertReplicasFollowRequests(self, port, process, log):
        """There are two while each would have too many requests; then one."""
        is_over = threading.Event()

        def ask():
            while not is_over.is_set():
                status, _ = post(port, {"instances": [[1, 2, 3]]})
                self.assertEqual(status, 200)

        def has_logged(text):
            with open(log) as file:
                return text in file.read().partition("ready at")[2]

        with futures.ThreadPoolExecutor(8) as pool:
            clients = [pool.submit(ask) for _ in range(8)]
            try:
                wait_for(lambda: has_logged("Adding 1 replica"), process, log)
            finally:
                is_over.set()
            for client in clients:
                client.result(SECONDS)
        wait_for(lambda: has_logged("Removing 1 replica"), process, log)
        status, _ = post(port, {"instances": [[1, 2, 3]]})
        self.assertEqual(status, 200)

    def test_strings_numbers_and_what_is_neither(self):
        path = self.create_tempdir().full_path
        mesh = tfscale.device_mesh(data=1)
        with tfscale.MeshStrategy(mesh).scope():
            words = keras.Input((), dtype="string", name="words")
            count = keras.Input((), dtype="int32", name="count")
            flag = keras.Input((), dtype="bool", name="flag")
            index = keras.layers.StringLookup(vocabulary=["a", "ü"])(words)
            word = keras.layers.StringLookup(vocabulary=["a", "ü"], invert=True)
            share = keras.ops.where(flag, 1.0, 2.0) / count
            model = keras.Model(
                {"words": words, "count": count, "flag": flag},
                {"word": word(index), "share": share},
            )
        tfscale.export(model, path)
        # The devices are there already.
        endpoint = serve.Endpoint("model", path, num_devices=1, use_gpus=True)

        def ask(**changes):
            row = {"words": "a", "count": 4, "flag": True} | changes
            asked = json.dumps({"instances": [row]})
            path = "/v1/models/model:predict"

            async def predict(inputs):
                return endpoint._model.predict([inputs])[0]

            with mock.patch.object(endpoint, "predict", predict):
                answer = endpoint.answer("POST", path, asked)
                status, text = asyncio.run(answer)
            content = json.loads(text)
            if status == 200:
                return list(content["predictions"][0].values())
            self.assertEqual(status, 400)
            return content["error"]

        self.assertCountEqual(ask(), ["a", 0.25])
        self.assertCountEqual(ask(words="ü", flag=False), ["ü", 0.5])
        encoded = base64.b64encode("ü".encode()).decode()
        self.assertCountEqual(ask(words={"b64": encoded}), ["ü", 0.25])
        self.assertCountEqual(ask(count=0), ["a", float("inf")])
        # They were 1, True and no number, and so answered.
        self.assertIn("'count' takes int32", ask(count=1.5))
        self.assertIn("'flag' takes bool", ask(flag="false"))
        self.assertIn("'count' takes int32", ask(count=None))
        self.assertIn("'words' takes string", ask(words=5))
        self.assertIn("['count', 'flag', 'more', 'words']", ask(more=1))
        # Inputs of two instances were those of one, and one was answered.
        two = [{"words": "a", "count": 4}, {"flag": True}]
        with self.assertRaisesRegex(ValueError, "the same inputs"):
            endpoint._model.inputs_of({"instances": two})

    def test_integers_without_a_sign_are_served(self):
        # NumPy's rules take no integer of JSON for a pixel.
        path = self.create_tempdir().full_path
        with tfscale.MeshStrategy(tfscale.device_mesh(data=1)).scope():
            pixels = keras.Input((2,), dtype="uint8", name="pixels")
            half = keras.layers.Rescaling(0.5)(pixels)
            model = keras.Model(pixels, half)
        tfscale.export(model, path)
        served = serve.SavedModel(path, num_devices=1, use_gpus=True)
        inputs = served.inputs_of({"instances": [[0, 255]]})
        [outputs] = served.predict([inputs])
        self.assertEqual(outputs["output_0"].tolist(), [[0.0, 127.5]])
        for wrong in (256, -1):
            with self.assertRaisesRegex(OverflowError, "out of bounds"):
                served.inputs_of({"instances": [[0, wrong]]})
        with self.assertRaisesRegex(ValueError, "'pixels' takes uint8"):
            served.inputs_of({"instances": [[0, 1.5]]})
        # These were errors of the server.
        for body in (
            *([1], 5, None, "text", {}, {"instances": 5}, {"inputs": "text"}),
            *({"instances": {"pixels": [0]}}, {"inputs": {"pixels": 5}}),
            {"instances": [{"pixels": [0, 1]}, 5]},
        ):
            with self.assertRaises(ValueError, msg=body):
                served.inputs_of(body)

    def test_answers_are_those_of_tensorflow_serving(self):
        outputs = {"a": np.array([[1], [2]]), "b": np.array([3, 4])}
        one = {"a": outputs["a"]}
        for body, given, expected in (
            ({"instances": 0}, one, {"predictions": [[1], [2]]}),
            ({"inputs": 0}, one, {"outputs": [[1], [2]]}),
            (
                {"inputs": 0},
                outputs,
                {"outputs": {"a": [[1], [2]], "b": [3, 4]}},
            ),
            (
                {"instances": 0},
                outputs,
                {"predictions": [{"a": [1], "b": 3}, {"a": [2], "b": 4}]},
            ),
        ):
            self.assertEqual(serve.answer_of(body, given), expected)


if __name__ == "__main__":
    absltest.main()
