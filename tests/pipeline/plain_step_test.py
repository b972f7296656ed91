"""A plain first step enters no module of what its user has not declared."""

import contextlib
import pathlib
import sys
import threading

import keras
import numpy as np
from absl.testing import absltest

import tfscale

# Each is for something that is declared: speeds, a zero_stage, a layout, an
# own optimizer, `jit_compile`, a memory limit, many microbatches, workers, ...
NOT_DECLARED = (
    "accumulation",
    "backup",
    "callbacks",
    "collectives/links.py",
    "graphs/xla_clusters.py",
    "mesh/models/without_call.py",
    "mesh/speeds.py",
    "mesh/update/clipping.py",
    "mesh/update/optimizer_checks.py",
    "pipeline/running/loop.py",
    "pipeline/running/measure.py",
    "pipeline/running/window.py",
    "pipeline/stages/memory.py",
    "planner",
    "schedules/simulate.py",
    "schedules/steady.py",
    "tensor_parallel/propagation",
    "tensor_parallel/rules",
    "tensor_parallel/sequence_parallel",
    "variables/sharding.py",
)
# Measured: 84 with Keras 3.15. Whoever follows a step has to read them.
MOST = 88


@contextlib.contextmanager
def modules_that_run():
    """Yields a set that gets the modules of tfscale whose functions run."""
    root, paths, found = pathlib.Path(tfscale.__file__).parent, set(), set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_name != "<module>":
            paths.add(frame.f_code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    for path in map(pathlib.Path, paths):
        if path.is_relative_to(root):
            found.add(path.relative_to(root).as_posix())


class PlainStepTest(absltest.TestCase):
    def test_only_what_is_declared_is_entered(self):
        x, y = np.ones((16, 8), "float32"), np.ones((16, 1), "float32")
        with modules_that_run() as found:
            mesh = tfscale.device_mesh(data=2, pipeline=2)
            with tfscale.MeshStrategy(mesh).scope():
                inputs = keras.Input((8,))
                outputs = inputs
                for _ in range(3):
                    outputs = keras.layers.Dense(8, "relu")(outputs)
                model = tfscale.PipelineModel(
                    keras.Model(inputs, keras.layers.Dense(1)(outputs)),
                    num_microbatches=2,
                )
                model.compile("adam", "mse")
            model.fit(x, y, batch_size=16, verbose=0)
        entered = [name for name in sorted(found) if _is_of(name, NOT_DECLARED)]
        self.assertEqual(entered, [])
        # It sees threads of replicas, too.
        self.assertIn("pipeline/running/executor.py", found)
        self.assertLessEqual(len(found), MOST)


def _is_of(name, places):
    return any(name == p or name.startswith(f"{p}/") for p in places)


if __name__ == "__main__":
    absltest.main()
