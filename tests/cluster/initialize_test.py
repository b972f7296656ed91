"""What `initialize` says of an environment; tests/distribute joins workers."""

import json
import os
from unittest import mock

import tensorflow as tf
from absl.testing import absltest

import tfscale
from tfscale.cluster.initialize import joined


def _environment(**variables):
    return mock.patch.dict(os.environ, variables)


class InitializeTest(absltest.TestCase):
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

    def test_the_launcher_says_how_many_devices_there_are(self):
        tf.config.list_logical_devices()  # Those of conftest.py: eight.
        with (
            _environment(TFSCALE_VIRTUAL_DEVICES="3"),
            self.assertRaisesRegex(RuntimeError, "num_devices=3"),
        ):
            tfscale.initialize()

    def test_a_broken_environment_is_an_error(self):
        cases = {
            "{": "must be JSON",
            '{"cluster": {"worker": ["a:1", "b:1"]}}': "which task",
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
