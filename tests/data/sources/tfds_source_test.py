"""Data sets of `tensorflow_datasets`."""

import tensorflow as tf
import tensorflow_datasets as tfds
from absl.testing import parameterized

from tfscale import data


class TfdsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(("cifar10", (32, 32, 3)), ("mnist", (28, 28, 1)))
    def test_by_name(self, name, shape):
        with tfds.testing.mock_data(num_examples=20):
            pipeline = data.pipeline(data.tfds(name, "train"), batch_size=8)
            images, labels = pipeline.element_spec
            self.assertEqual(images.shape, (None, *shape))
            self.assertEqual(labels.dtype, tf.int64)
            self.assertLen(list(pipeline), 3)
            features = data.pipeline(
                data.tfds(
                    name,
                    "train",
                    as_supervised=False,
                    read_config=tfds.ReadConfig(try_autocache=False),
                ),
                batch_size=8,
            )
            self.assertIn("label", features.element_spec)
            self.assertEqual(features.element_spec["image"].dtype, tf.uint8)


if __name__ == "__main__":
    tf.test.main()
