"""A run that was killed ends bit for bit where one ends that was not."""

import functools
import itertools
import json
import os
import signal
import tempfile

import pytest
from absl.testing import absltest
from absl.testing import parameterized

from tests.backup import jobs

# Of a run that has 5 steps an epoch and saves after each 2.
BATCHES = ("batch 3", "batch 5", "batch 4")
ALL_CALLBACKS = (
    *("stop", "plateau", "schedule", "checkpoint"),
    *("csv", "append", "board", "ema", "random", "noise", "accumulation"),
)
MESHES = {
    "data": dict(mesh={"data": 2}),
    "ZeRO": dict(mesh={"data": 2}, options={"zero_stage": 1}),
    "pipeline": dict(mesh={"pipeline": 2}),
    "model": dict(mesh={"model": 2}),
    "all three": dict(mesh={"data": 2, "pipeline": 2, "model": 2}),
}
MORE_ON_A_MESH = {
    ("data", "unknown"): dict(callbacks=["accumulation"]),
    ("data", "shuffle"): dict(model="normalized"),
    ("data", "arrays"): dict(callbacks=ALL_CALLBACKS),
    # Its validation is half of a second round further each time.
    ("data", "not ahead"): dict(validate="not ahead"),
    ("ZeRO", "tfscale"): dict(callbacks=ALL_CALLBACKS),
    # A pipeline has microbatches, and noise is of several replicas.
    ("pipeline", "shuffle"): dict(callbacks=ALL_CALLBACKS[:-2]),
    ("model", "shuffle"): dict(callbacks=ALL_CALLBACKS),
    ("all three", "tfscale"): dict(callbacks=ALL_CALLBACKS[:-1]),
    **{
        (mesh, "arrays"): dict(validate=False)  # one function less to trace
        for mesh in ("ZeRO", "pipeline", "model", "all three")
    },
    ("pipeline", "tfscale"): dict(validate=False),
    ("model", "tfscale"): dict(validate=False),
}


def whole_of(backup=None, save_freq=None, **arguments):
    """What a run that is not killed comes to, and its logs by name.

    However it is saved: once for all tests with the same training.
    """
    return _whole(json.dumps(arguments))


@functools.cache
def _whole(arguments):
    with tempfile.TemporaryDirectory() as folder:
        found = jobs.run(folder=f"{folder}/whole", **json.loads(arguments))
        return found, _logs(f"{folder}/whole")


def _logs(folder):
    logs = {}
    for name in ("log.csv", "append.csv"):
        if os.path.exists(f"{folder}-{name}"):
            with open(f"{folder}-{name}") as file:
                logs[name] = file.read()
    return logs


class KillMatrixTest(parameterized.TestCase):
    def assert_same_end(self, kills, **arguments):
        """Kills a training at each of the points, in processes of their own."""
        folder = self.create_tempdir().full_path
        whole, logs = whole_of(**arguments)
        interval = arguments.get("save_freq", 2) * 2
        last = -1
        for kill in kills:
            with self.assertRaises(jobs.Killed) as raised:
                jobs.run(folder=f"{folder}/runs", kill=kill, **arguments)
            made = [
                [int(n) for n in line.split()[1:]]
                for line in str(raised.exception).splitlines()
                if line.startswith("STEP")
            ]
            if made:
                steps = len({(e, b) for e, b, _ in whole["steps"]})
                per_epoch = steps / len(whole["epochs"])
                begin = made[0][0] * per_epoch + made[0][1]
                self.assertGreaterEqual(begin, last - interval, kill)
                last = made[-1][0] * per_epoch + made[-1][1]
        end = jobs.run(folder=f"{folder}/runs", **arguments)
        for name in set(whole) - {"said"}:
            self.assertEqual(end[name], whole[name], name)
        self.assertFalse(os.path.exists(f"{folder}/runs/backup-"))
        self.assertEqual(_logs(f"{folder}/runs"), logs)
        return end

    @parameterized.parameters(
        "arrays", "shuffle", "unknown", "repeat", "tfscale"
    )
    @pytest.mark.crossing
    def test_between_batches(self, data):
        self.assert_same_end(BATCHES, data=data)

    @parameterized.parameters("twice", "repeat")
    @pytest.mark.crossing
    def test_seeds_that_a_shuffle_takes_in_the_middle_of_an_epoch(self, data):
        # In training and in validation: iterators were made again, and not
        # read as far as they had been.
        self.assert_same_end(("batch 14",), data=data)

    @parameterized.product(
        data=("by number shuffled", "workers shuffled"),
        mesh=(None, {"data": 2}),
    )
    @pytest.mark.crossing
    def test_the_order_that_keras_draws_of_a_py_dataset(self, data, mesh):
        # With Python's `random`, before the epoch that is gone on with.
        self.assert_same_end(("batch 9",), data=data, mesh=mesh)

    @parameterized.parameters(*(range(n, 13, 4) for n in (1, 2, 3, 4)))
    @pytest.mark.crossing(every=4)
    def test_at_each_point_of_a_save(self, *numbers):
        # A save has ten of them, with those of removing the one before.
        points = [f"save {number}" for number in numbers]
        self.assert_same_end(points, data="shuffle", backup={"keep": 1})

    @parameterized.parameters(
        ("batch 3", "batch 5", "validation 2", "restore", "batch 1"),
        ("epoch 1", "batch 1"),
        ("validation 2", "epoch 1", "restore", "batch 1", "batch 1"),
    )
    @pytest.mark.crossing(every=3)
    def test_in_an_epoch_in_validation_at_their_end_and_while_restoring(
        self, *kills
    ):
        self.assert_same_end(kills, data="shuffle")

    @pytest.mark.crossing
    def test_all_callbacks_together(self):
        self.assert_same_end(("batch 4", "epoch 1"), callbacks=ALL_CALLBACKS)

    @parameterized.parameters(
        dict(model="counted", optimizer="adam"),
        dict(model="normalized", data="unknown"),
        dict(steps_per_execution=2),
        # Five batches in steps of three: the last one finds two.
        dict(
            kills=("batch 3",),
            steps_per_execution=3,
            data="unknown",
            validate=False,
        ),
        dict(save_freq="epoch"),
    )
    @pytest.mark.crossing
    def test_other_models_and_steps(
        self, kills=("batch 4", "batch 4"), **arguments
    ):
        freq = {"epoch": 5}.get(arguments.get("save_freq"))
        if freq:
            folder = self.create_tempdir().full_path
            whole = jobs.run(folder=f"{folder}/a", **arguments)
            with self.assertRaises(jobs.Killed):
                # The save before the third epoch has waited for the one
                # before the second, which is therefore there.
                jobs.run(folder=f"{folder}/b", kill="batch 13", **arguments)
            end = jobs.run(folder=f"{folder}/b", **arguments)
            self.assertEqual(end["weights"], whole["weights"])
            self.assertEqual(end["steps"], whole["steps"])
            self.assertNotIn("STEP 0", end["said"])
            return
        self.assert_same_end(kills, **arguments)

    @parameterized.parameters(
        *(("data", data) for data in ("unknown", "not ahead")),
        ("data", "distributed tfscale"),
        *(
            cell
            for cell in itertools.product(
                MESHES, ("arrays", "shuffle", "tfscale")
            )
            if cell != ("data", "tfscale")  # as on ZeRO
        ),
    )
    @pytest.mark.crossing
    def test_on_a_mesh(self, mesh, data):
        # Strategies read each kind of data ahead in another way. In the second
        # epoch: it has validated, on data that is shuffled anew.
        arguments = {**MESHES[mesh], **MORE_ON_A_MESH.get((mesh, data), {})}
        arguments |= dict(data=data, epochs=2, optimizer="adam")
        self.assert_same_end(("batch 9",), **arguments)


class ElasticTest(parameterized.TestCase):
    @parameterized.parameters(
        (
            dict(mesh={"data": 2}, options={"zero_stage": 1}),
            dict(mesh={"pipeline": 2}),
            dict(mesh={"model": 2}),
        ),
        (
            dict(mesh={"data": 2}, options={"zero_stage": 3}),
            dict(mesh={"data": 4}, options={"zero_stage": 3}),
            dict(mesh={"data": 2, "model": 2}, options={"zero_stage": 3}),
        ),
    )
    @pytest.mark.crossing(every=2)
    def test_on_another_mesh(self, *meshes):
        folder = self.create_tempdir().full_path
        arguments = dict(data="tfscale", model="plain")
        whole, _ = whole_of(**arguments)
        for mesh in meshes:
            with self.assertRaises(jobs.Killed):
                jobs.run(
                    folder=f"{folder}/runs", kill="batch 4", **arguments, **mesh
                )
        end = jobs.run(folder=f"{folder}/runs", **arguments)
        for value, expected in zip(end["values"], whole["values"]):
            jobs.assert_close(value, expected, 1e-5)
        self.assertEqual(end["iterations"], whole["iterations"])

    @pytest.mark.crossing
    def test_each_record_once_with_other_batch_sizes(self):
        folder = self.create_tempdir().full_path
        sizes = (8, 4, 10)
        for size in sizes:
            with self.assertRaises(jobs.Killed) as raised:
                jobs.run(
                    folder=folder,
                    kill="batch 2",
                    data="counting",
                    model="counting",
                    batch_size=size,
                    save_freq=1,
                    epochs=2,
                    validate=False,
                )
            del raised
        end = jobs.run(
            folder=folder,
            data="counting",
            model="counting",
            batch_size=8,
            save_freq=1,
            epochs=2,
            validate=False,
        )
        # The layer adds up what it sees: each record once in each epoch.
        self.assertEqual(end["seen"], 2 * sum(range(1, 41)))


class SignalTest(absltest.TestCase):
    def test_sigterm_saves_at_the_next_step(self):
        folder = self.create_tempdir().full_path
        arguments = dict(data="shuffle", save_freq="epoch")
        whole, _ = whole_of(**arguments)
        with self.assertRaisesRegex(RuntimeError, f"^{128 + signal.SIGTERM}: "):
            jobs.run(folder=f"{folder}/runs", terminate=4, **arguments)
        end = jobs.run(folder=f"{folder}/runs", **arguments)
        self.assertEqual(end["weights"], whole["weights"])
        self.assertEqual(end["steps"], whole["steps"])
        self.assertIn("STEP 0 4", end["said"])
        self.assertNotIn("STEP 0 3", end["said"])


if __name__ == "__main__":
    absltest.main()
