"""Devices have the names that TensorFlow gives them."""

import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tfscale.collectives import device_names

GPU_OF_A_WORKER = "/job:worker/replica:0/task:1/device:GPU:2"


class DeviceNamesTest(parameterized.TestCase):
    @parameterized.parameters(
        ("/device:CPU:1", "", "/job:localhost/replica:0/task:0/device:CPU:1"),
        ("/gpu:3", "", "/job:localhost/replica:0/task:0/device:GPU:3"),
        ("", GPU_OF_A_WORKER, GPU_OF_A_WORKER),
        (GPU_OF_A_WORKER, "/job:ps/task:0", GPU_OF_A_WORKER),
        ("/task:2", "/job:ps", "/job:ps/replica:0/task:2/device:CPU:0"),
    )
    def test_what_is_left_out_is_that_of_the_default(self, name, default, full):
        self.assertEqual(device_names.full_name(name, default), full)

    def test_an_operation_is_on_the_device_of_that_name(self):
        with tf.device("/CPU:0"):
            x = tf.constant(1.0) + 1.0
        self.assertEqual(x.device, device_names.full_name("/CPU:0"))

    def test_the_host_of_a_device_is_the_first_cpu_of_its_task(self):
        self.assertEqual(
            device_names.host_of(GPU_OF_A_WORKER),
            "/job:worker/replica:0/task:1/device:CPU:0",
        )


if __name__ == "__main__":
    absltest.main()
