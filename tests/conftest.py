"""Prepares TensorFlow before any test imports it, and each test after that.

Eight virtual CPU devices stand for the accelerators of every test. They have
to exist before TensorFlow starts its runtime, hence here and not in a fixture.
No file of tests starts it when it is imported: see `processes.py`.
"""

import gc
import inspect
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
# On CPUs XLA compiles clusters, where a function asks for them, only with this.
os.environ.setdefault("TF_XLA_FLAGS", "--tf_xla_cpu_global_jit")

import keras
import pytest
import tensorflow as tf
from absl import flags

from tests import forked_python
from tests.processes import pytest_addoption  # noqa: F401
from tests.processes import pytest_runtestloop  # noqa: F401
from tests.processes import pytest_terminal_summary  # noqa: F401

NUM_VIRTUAL_DEVICES = 8

# Under pytest no `absltest.main` does it; `create_tempdir` reads a flag.
flags.FLAGS.mark_as_parsed()

# A process ends with its file of tests, and all garbage with it. Looking for it
# took a tenth of the time.
gc.disable()


def pytest_collection_modifyitems(config, items):
    """Leaves out what is not asked for.

    Also a method of `tf.test.TestCase` that is called like a test.
    """
    items[:] = [item for item in items if item.name != "test_session"]
    kept, left_out, seen = [], [], {}
    for item in items:
        is_extra = False
        if marker := item.get_closest_marker("crossing"):
            test = item.parent.nodeid, inspect.unwrap(item.function).__name__
            number = seen[test] = seen.get(test, -1) + 1
            every = marker.kwargs.get("every")
            is_extra = every is None or number % every > 0
        wanted = {None: not is_extra, "all": True, "others": is_extra}
        asked_for = wanted[config.option.exhaustive]
        (kept if asked_for else left_out).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish():
    """Makes the devices, which refuses files that have started TensorFlow.

    Before that, what the tests start is forked where all is imported.
    """
    forked_python.serve()
    try:
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * NUM_VIRTUAL_DEVICES,
        )
    except RuntimeError as error:
        raise pytest.UsageError(
            "No file of tests may start TensorFlow when it is imported, "
            "because it cannot be forked after that. One of these does: it "
            "makes a tensor, a dataset or a variable at its top level. Make "
            "it in the test, or in a function."
        ) from error


def pytest_unconfigure():
    forked_python.end()


@pytest.fixture(autouse=True)
def _fresh_keras_state():
    """No test sees names, seeds or a dtype policy that another one left."""
    keras.config.set_dtype_policy("float32")
    keras.config.disable_interactive_logging()
    # Without a collection of garbage, which takes a second once there are
    # hundreds of traced functions.
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
