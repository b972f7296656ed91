"""Keras' own tests, of the installed wheel, in the scope of a strategy.

    python -m tests.keras_own_tests [FOLDER_OR_FILE ...]

Each runs twice, in plain Keras and in the scope of `MeshStrategy(data=2)`,
which is entered after Keras' `setUp`: that clears the session. Losses are
called as in a step; outside of one Keras divides them by the replicas.
Optimizers are called by replicas, with an equal share of each gradient; outside
of these Keras applies none. It is an error if a test fails in the scope that
passes without it, and is not in `MAY_FAIL`; or if one of those passes. Some
import jax, and are left out where that is not installed. Wheels of nightly
builds have no tests.
"""

import contextlib
import inspect
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from unittest import mock

import keras

# Below `keras/src`.
CHOSEN = (
    *("callbacks", "models", "saving", "optimizers", "metrics", "losses"),
    "trainers/trainer_test.py",
)
_OF_ROWS = "expects the rows of a gradient, and replicas sum whole ones"
# Why a test may fail in a scope.
MAY_FAIL = {
    "SwapEMAWeightsTest::test_swap_ema_weights_with_tf_distribute": (
        "makes another strategy, in the scope of this one"
    ),
    # By default Python shows the same warning of one line once.
    "FunctionalTest::test_warning_for_mismatched_inputs_structure": (
        "has every warning shown, and Keras gives one in each replica's trace"
    ),
    **{
        f"OptimizerSparseTest::test_sparse_gradients_{name}": _OF_ROWS
        for name in (
            *("adadelta", "adafactor", "adagrad", "loss_scale_optimizer_sgd"),
            *("rmsprop", "scatter_update", "sgd"),
        )
    },
    **{
        f"TestTrainer::test_fit_sparse_{kind}_{mode}": _OF_ROWS
        for kind in ("jax", "scipy", "tf")
        for mode in ("eager", "graph")
    },
}

_MARKERS = ("multi_device", "requires_trainable_backend", "skipif")
# Where outcomes are written, and whether tests are in a scope.
_OUTCOMES, _IN_SCOPE = "TFSCALE_OUTCOMES", "TFSCALE_IN_SCOPE"


# --- the plugin of pytest, in a process for each of the two ------------------


def pytest_configure(config):
    for marker in _MARKERS:
        config.addinivalue_line("markers", f"{marker}: of Keras")
    if os.environ.get(_IN_SCOPE):
        _enter_scopes()


def _enter_scopes():
    import tfscale

    tfscale.use_virtual_devices(2)
    from keras.src import testing

    from tfscale.adapters.optimizer import MeshOptimizer
    from tfscale.context import step_context

    set_up = testing.TestCase.setUp

    def set_up_in_scope(self):
        # Some tests are set up twice.
        stack = vars(self).setdefault("scopes", contextlib.ExitStack())
        stack.close()
        set_up(self)
        mesh = tfscale.device_mesh(data=2)
        stack.enter_context(tfscale.MeshStrategy(mesh).scope())
        folder = pathlib.Path(inspect.getfile(type(self))).parent.name
        if folder == "losses":
            stack.enter_context(step_context.within_ranks(replica=0))
        if folder == "optimizers":
            for name in ("apply", "apply_gradients", "scale_loss"):
                method = getattr(MeshOptimizer, name)
                stack.enter_context(
                    mock.patch.object(MeshOptimizer, name, _by_replicas(method))
                )
        self.addCleanup(stack.close)

    testing.TestCase.setUp = set_up_in_scope


def _by_replicas(method):
    """A method of an optimizer, called by all replicas if it is by none."""
    import tensorflow as tf

    def share_of(gradient, variable, count):
        if gradient is None or getattr(
            variable, "overwrite_with_gradient", False
        ):
            return gradient
        if isinstance(gradient, tf.IndexedSlices):
            # Keras' tests give tuples.
            return tf.IndexedSlices(
                gradient.values / count,
                tf.convert_to_tensor(gradient.indices),
                tf.convert_to_tensor(gradient.dense_shape),
            )
        return tf.math.scalar_mul(1 / count, gradient)

    def call(self, first, trainable_variables=None):
        others = (trainable_variables,) if method.__name__ == "apply" else ()
        strategy = tf.distribute.get_strategy()
        if not (
            tf.distribute.has_strategy()
            and tf.distribute.in_cross_replica_context()
        ):
            return method(self, first, *others)
        count = strategy.num_replicas_in_sync
        if method.__name__ == "apply":
            variables = trainable_variables or self._trainable_variables
            pairs = itertools.zip_longest(first, variables)
            first = [share_of(*pair, count) for pair in pairs]
        elif method.__name__ == "apply_gradients":
            first = [(share_of(*pair, count), pair[1]) for pair in first]
        result = strategy.run(lambda: method(self, first, *others))
        if result is None or method.__name__ != "scale_loss":
            return result
        return strategy.experimental_local_results(result)[0]

    return call


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        path = os.environ.get(_OUTCOMES)
        if path:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = " ".join(crash.message.split())[:200] if crash else ""
            with open(path, "a") as file:
                print(
                    json.dumps([report.nodeid, report.outcome, reason]),
                    file=file,
                )


# --- the program -------------------------------------------------------------


def main(chosen):
    """Runs tests twice, and returns the exit status."""
    source = pathlib.Path(keras.__file__).parent / "src"
    if not any(source.rglob("*_test.py")):
        print(f"Keras {keras.__version__} is installed without its tests.")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            _start(folder, source, chosen, in_scope) for in_scope in ("", "1")
        ]
        plain, scoped = (_outcomes(folder, run) for run in runs)
    failed = {
        name: reason
        for name, (outcome, reason) in scoped.items()
        if outcome == "failed" and plain.get(name, [""])[0] == "passed"
    }
    known = {
        name: MAY_FAIL[x] for name in failed if (x := _short(name)) in MAY_FAIL
    }
    for name in sorted(failed):
        print(f"{name}\n    {known.get(name) or f'UNEXPECTED: {failed[name]}'}")
    passed = sum(outcome == "passed" for outcome, _ in plain.values())
    print(
        f"{passed} tests pass in plain Keras {keras.__version__}. Of these "
        f"{len(failed)} fail in a scope, {len(failed) - len(known)} of them "
        "unexpectedly."
    )
    unused = [
        name
        for name, (outcome, _) in scoped.items()
        if outcome == "passed" and _short(name) in MAY_FAIL
    ]
    for name in unused:
        print(f"{name!r} passes now: it is no exception any more.")
    return int(len(failed) > len(known) or bool(unused))


def _short(name):
    """The class and the function of a test."""
    return name.partition("::")[2]


def _start(folder, source, chosen, in_scope):
    path = os.path.join(folder, f"outcomes{in_scope}")
    configuration = os.path.join(folder, "pytest.ini")
    with open(configuration, "w") as file:
        file.write("[pytest]\n")
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-c", configuration),
        *("--continue-on-collection-errors", "--import-mode=importlib"),
        *("-p", "no:cacheprovider", "-p", __spec__.name, "--tb=short"),
        *("--rootdir", source, "-W", "ignore"),
        *(str(source / each) for each in chosen),
    ]
    environment = {**os.environ, _OUTCOMES: path, _IN_SCOPE: in_scope}
    with open(os.path.join(folder, f"output{in_scope}"), "w") as output:
        return in_scope, subprocess.Popen(
            command, env=environment, stdout=output, stderr=output
        )


def _outcomes(folder, run):
    """The outcome and the reason of each test, by its name."""
    in_scope, process = run
    process.wait()
    with open(os.path.join(folder, f"output{in_scope}")) as output:
        where = "in a scope" if in_scope else "plain"
        lines = re.findall(r"^\d+ .* in .*s.*$", output.read(), re.M)
        print(f"{where}: {lines[-1:]}")
    found = {}
    with open(os.path.join(folder, f"outcomes{in_scope}")) as file:
        for line in file:
            name, outcome, reason = json.loads(line)
            if found.get(name, [""])[0] != "failed":
                found[name] = outcome, reason
    return found


if __name__ == "__main__":
    sys.exit(main(tuple(sys.argv[1:]) or CHOSEN))
