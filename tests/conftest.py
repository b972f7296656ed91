"""Prepares TensorFlow before any test imports it, and each test after that.

Eight virtual CPU devices stand for the accelerators of every test. They have
to exist before TensorFlow starts its runtime, hence here and not in a fixture.
"""

import gc
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import keras
import pytest
import tensorflow as tf
from absl import flags

from tfscale import _internals

NUM_VIRTUAL_DEVICES = 8

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * NUM_VIRTUAL_DEVICES,
)


# Under pytest no `absltest.main` does it; `create_tempdir` reads a flag.
flags.FLAGS.mark_as_parsed()

# What was imported so far never is garbage: no collection looks at it again.
# Tracing makes many objects that live; looking for garbage among them every
# 700 took some per cent of the time.
gc.freeze()
gc.set_threshold(20_000, 20, 20)


def pytest_collection_modifyitems(items):
    """Leaves out a method of `tf.test.TestCase` that is called like a test."""
    items[:] = [item for item in items if item.name != "test_session"]


@pytest.fixture(autouse=True, scope="module")
def _nothing_kept_of_a_module(request):
    """Lets go of what a module has cached, and TensorFlow of its graphs.

    It would keep them for ever, some 10 MB for each model.
    """
    yield
    for value in vars(request.module).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()
    _internals.forget_custom_gradients()
    gc.collect()


@pytest.fixture(autouse=True)
def _fresh_keras_state():
    """No test sees names, seeds or a dtype policy that another one left."""
    keras.config.set_dtype_policy("float32")
    keras.config.disable_interactive_logging()
    # Without a collection of garbage, which takes a second once there are
    # hundreds of traced functions.
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
