"""What `initialize` says of an environment; tests/distribute joins workers."""

import json
import os
from unittest import mock

import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

import tfscale
from tfscale.cluster.initialize import joined


def _environment(**variables):
    return mock.patch.dict(os.environ, variables)


class InitializeTest(parameterized.TestCase):
    def test_without_a_cluster_nothing_is_joined(self):
        tfscale.initialize()
        self.assertIsNone(joined())

    def test_a_cluster_of_one_is_none(self):
        config = {
            "cluster": {"worker": ["localhost:1"]},
            "task": {"type": "worker", "index": 0},
        }
        with _environment(TF_CONFIG=json.dumps(config)):
            tfscale.initialize()
        self.assertIsNone(joined())

    def test_nobody_trains_alone_who_was_started_as_one_of_several(self):
        # It had trained, silently, by itself.
        config = {
            "cluster": {"worker": ["localhost:1", "localhost:2"]},
            "task": {"type": "worker", "index": 1},
        }
        mesh = tfscale.device_mesh(data=2)
        with (
            _environment(TF_CONFIG=json.dumps(config)),
            self.assertRaisesRegex(ValueError, "Call `tfscale.initialize"),
        ):
            tfscale.MeshStrategy(mesh)

    def test_the_launcher_says_how_many_devices_there_are(self):
        tf.config.list_logical_devices()  # Those of conftest.py: eight.
        with (
            _environment(TFSCALE_VIRTUAL_DEVICES="3"),
            self.assertRaisesRegex(RuntimeError, "num_devices=3"),
        ):
            tfscale.initialize()

    @parameterized.parameters(False, True)
    def test_what_tensorflow_has_made_before_would_be_lost(self, coordinator):
        # It was said much later, and not in words: "Client for target
        # /job:localhost/replica:0/task:0 not found".
        tf.config.list_logical_devices()
        threads = tf.config.threading.get_inter_op_parallelism_threads()
        config = {
            "cluster": {"worker": ["localhost:1", "localhost:2"]},
            "task": {"type": "worker", "index": 0},
        }
        with (
            _environment(TF_CONFIG=json.dumps(config)),
            self.assertRaisesRegex(RuntimeError, "before TensorFlow starts"),
        ):
            tfscale.initialize(coordinator=coordinator)
        self.assertEqual(
            tf.config.threading.get_inter_op_parallelism_threads(), threads
        )

    def test_a_broken_environment_is_an_error(self):
        cases = {
            "{": "must be JSON",
            '{"cluster": {"worker": ["a:1", "b:1"]}}': "task in the cluster",
            '{"cluster": {"worker": ["a:1", "b:1"]}, '
            '"task": {"type": "worker", "index": 2}}': "task 2",
            '{"cluster": {"worker": ["a:1"], "ps": ["b:1"]}, '
            '"task": {"type": "worker", "index": 0}}': "ps",
        }
        for text, message in cases.items():
            with (
                self.subTest(text),
                _environment(TF_CONFIG=text),
                self.assertRaisesRegex(ValueError, message),
            ):
                tfscale.initialize()
        self.assertIsNone(joined())


if __name__ == "__main__":
    absltest.main()
