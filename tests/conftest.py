"""Prepares TensorFlow before any test imports it, and each test after that.

Eight virtual CPU devices stand for the accelerators of every test. They have
to exist before TensorFlow starts its runtime, hence here and not in a fixture.
No file of tests starts it when it is imported: see `processes.py`.
"""

import collections
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

from tests import crossings
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
    cases = collections.defaultdict(list)
    for item in items:
        if marker := item.get_closest_marker("crossing"):
            test = item.parent.nodeid, inspect.unwrap(item.function).__name__
            cases[*test, marker.kwargs.get("every")].append(item)
    extra = set()
    for (*test, every), items_of_test in cases.items():
        extra.update(items_of_test)
        if every is not None:
            names = [f"{test} {_arguments(item)}" for item in items_of_test]
            always = crossings.always(names, every)
            extra.difference_update(items_of_test[i] for i in always)
    kept, left_out = [], []
    for item in items:
        is_extra = item in extra
        wanted = {None: not is_extra, "all": True, "others": is_extra}
        asked_for = wanted[config.option.exhaustive]
        (kept if asked_for else left_out).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


def _arguments(item):
    """The arguments of a case, as absl notes them on its method."""
    return getattr(item.function, "__x_params_repr__", item.name)


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
