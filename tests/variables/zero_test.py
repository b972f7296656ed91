"""Replicas that divide optimizer slots have the numbers of one device."""

import dataclasses
import functools
import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers
from tests.tensor_parallel import optimizer_test
from tests.tensor_parallel import same_numbers_test

OPTIMIZERS = keras.optimizers
LAYOUTS = optimizer_test.LAYOUTS


def odd():
    """With variables that 2 replicas cannot divide, and one along its end."""
    x = inputs = keras.Input((12,))
    x = keras.layers.Dense(15, activation="relu", name="up")(x)
    x = keras.layers.Dense(12, name="down")(x)
    return keras.Model(inputs, x, name="odd")


def constrained():
    return optimizer_test.mlp(
        kernel_constraint=keras.constraints.MaxNorm(0.5),
        kernel_regularizer="l2",
    )


def whole_batches(job):
    """The job without its last batch, which is smaller: half the traces."""
    x, y = job.data["x"][:32], job.data["y"][:32]
    return dataclasses.replace(job, data={**job.data, "x": x, "y": y})


def scheduled():
    rate = OPTIMIZERS.schedules.CosineDecay(0.05, 3)
    return OPTIMIZERS.SGD(rate, momentum=0.9, nesterov=True)


# With epsilons that keep the rounding of a gradient near zero from becoming a
# whole step.
MAKE = {
    "adadelta": lambda: OPTIMIZERS.Adadelta(0.5, epsilon=1e-3),
    "adagrad": lambda: OPTIMIZERS.Adagrad(0.05, epsilon=1e-3),
    "adam": lambda: OPTIMIZERS.Adam(0.01, epsilon=1e-3, amsgrad=True),
    "adamax": lambda: OPTIMIZERS.Adamax(0.01, epsilon=1e-3),
    "adamw": lambda: OPTIMIZERS.AdamW(0.01, weight_decay=0.1, epsilon=1e-3),
    "ftrl": lambda: OPTIMIZERS.Ftrl(0.05),
    "lion": lambda: OPTIMIZERS.Lion(0.01),
    "nadam": lambda: OPTIMIZERS.Nadam(0.01, epsilon=1e-3),
    "rmsprop": lambda: OPTIMIZERS.RMSprop(
        0.01, epsilon=1e-3, momentum=0.9, centered=True
    ),
    "schedule_free": lambda: OPTIMIZERS.ScheduleFreeAdamW(0.01, epsilon=1e-3),
    "sgd_scheduled": scheduled,
    "clipnorm": optimizer_test.MAKE["clipnorm"],
    "clipvalue": optimizer_test.MAKE["clipvalue"],
    "ema": optimizer_test.MAKE["ema"],
    "ema_in_the_end": lambda: OPTIMIZERS.SGD(0.05, use_ema=True),
    "loss_scale_factor": lambda: OPTIMIZERS.Adam(
        0.01, epsilon=1e-3, global_clipnorm=0.1, loss_scale_factor=256.0
    ),
    "loss_scale": lambda: optimizer_test.scaled(
        OPTIMIZERS.AdamW(0.01, global_clipnorm=0.1, use_ema=True)
    ),
}
JOBS = {
    **{name: optimizer_test.job(make) for name, make in MAKE.items()},
    "odd": optimizer_test.job(MAKE["adam"], odd),
    "constrained": optimizer_test.job(MAKE["adam"], constrained),
    # One block shows what two would: half as much to trace.
    "block_adam": same_numbers_test.JOBS["block_adam"],
    "block_whole": whole_batches(same_numbers_test.JOBS["block_adam"]),
}
# With model ranks too: what the ranks make of it is of the rank's tests.
ON_RANKS = ("adam", "clipnorm", "constrained", "ema_in_the_end", "loss_scale")
# Pipelines: data, pipeline, model.
PIPELINES = (
    ("constrained", (2, 2, 1)),
    ("loss_scale", (2, 2, 1)),
    ("block_adam", (2, 2, 1)),
    ("odd", (2, 1, 1)),
    ("clipnorm", (2, 2, 2)),
    ("block_whole", (2, 2, 2)),
)


@functools.cache
def one_device(name):
    return same_numbers.on_one_device(JOBS[name])


@functools.cache
def sharded(name, data, pipeline=None, model=1):
    return same_numbers.on_zero(
        JOBS[name],
        data,
        pipeline,
        model,
        LAYOUTS if name in ON_RANKS else None,
    )


def graph_of_step(model):
    strategy = model.distribute_strategy
    step = tf.function(
        lambda x, y: strategy.run(model.train_step, args=((x, y),)),
        autograph=False,  # as in `fit`
    )
    data = tf.zeros((8, 12)), tf.zeros((8, 12))
    return step.get_concrete_function(*data).graph


def check_parts(test, outcome, data, model=1):
    """Every slot is in parts, each where its weight is, and none is whole."""
    weights = {v.path.replace("/", "_"): v for v in outcome.model.variables}
    names = sorted(weights, key=len)
    seen, whole = 0, []
    for slot in outcome.model.optimizer.variables:
        name = slot.path.split("/")[-1]
        owners = [n for n in names if name.startswith(f"{n}_")]
        if not owners:
            continue
        seen += 1
        weight = weights[owners[-1]].value
        test.assertEqual(
            [c.device for c in slot.value.values],
            [c.device for c in weight.values],
        )
        test.assertLen(weight.values, data * model)
        shard = weight.values[0].shape.as_list()
        sharded = (d for d, size in enumerate(shard) if size % data == 0)
        dim = next(sharded, None)
        if dim is None:
            whole.append(slot)
        else:
            shard[dim] //= data
        for component in slot.value.values:
            test.assertEqual(component.shape, shard, slot.path)
        # Put together they are the slot, as saved.
        test.assertEqual(np.array(slot).shape, tuple(slot.shape))
        test.assertEqual(tuple(slot.shape), tuple(weight.whole_shape))
    test.assertGreater(seen, 0)
    return whole


class SameNumbersTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        # The first one has variables that replicas cannot divide.
        "odd",
        *(name for name in JOBS if name not in ("odd", "block_whole")),
    )
    @pytest.mark.crossing(every=20)
    def test_of_one_device_on_two_replicas(self, name):
        outcome = sharded(name, 2)
        same_numbers.assert_same(self, one_device(name), outcome)

    @parameterized.parameters(*ON_RANKS)
    @pytest.mark.crossing(every=6)
    def test_of_one_device_on_two_replicas_of_two_ranks(self, name):
        outcome = sharded(name, 2, model=2)
        same_numbers.assert_same(self, one_device(name), outcome)
        if name != "clipnorm":  # which has no slots
            check_parts(self, outcome, 2, 2)

    @parameterized.parameters(*PIPELINES)
    @pytest.mark.crossing(every=6)
    def test_of_one_device_in_pipelines(self, name, size):
        outcome = sharded(name, *size)
        same_numbers.assert_same(self, one_device(name), outcome)
        if name != "clipnorm":  # which has no slots
            check_parts(self, outcome, size[0], size[2])

    @parameterized.parameters(3, 4)
    @pytest.mark.crossing
    def test_of_one_device_on_more_replicas(self, data):
        job = dataclasses.replace(
            JOBS["adam"], data={**JOBS["adam"].data, "batch_size": 12}
        )
        outcome = same_numbers.on_zero(job, data)
        same_numbers.assert_same(self, same_numbers.on_one_device(job), outcome)
        check_parts(self, outcome, data)

    @parameterized.parameters("adam", "sgd_scheduled", "clipvalue")
    @pytest.mark.crossing(every=3)
    def test_elementwise_updates_are_equal_to_the_last_bit(self, name):
        """To those of replicas that all have whole slots."""
        with same_numbers.calls_of_each_replica():
            whole = same_numbers.on_zero(JOBS[name], 2, zero_stage=0)
        same_numbers.assert_equal(self, whole, sharded(name, 2))

    @pytest.mark.crossing
    def test_in_mixed_precision(self):
        job = dataclasses.replace(JOBS["adam"], build=mixed)
        with same_numbers.calls_of_each_replica():
            whole = same_numbers.on_zero(job, 2, zero_stage=0)
        outcome = same_numbers.on_zero(job, 2)
        same_numbers.assert_equal(self, whole, outcome)
        check_parts(self, outcome, 2)


def mixed():
    return optimizer_test.mlp(dtype="mixed_bfloat16")


class PlacementTest(tf.test.TestCase, parameterized.TestCase):
    def test_what_no_dim_divides_stays_whole(self):
        whole = check_parts(self, sharded("odd", 2), 2)
        self.assertEqual(
            [tuple(slot.shape) for slot in whole], [(15,)] * len(whole)
        )
        self.assertLen(whole, 3)

    def test_a_device_has_its_share_of_bytes(self):
        for model in (1, 2):
            outcome = sharded("adam", 2, model=model)
            whole, held = 0, {}
            for slot in outcome.model.optimizer.variables[2:]:
                whole += np.array(slot).nbytes
                for component in slot.value.values:
                    held.setdefault(component.device, 0)
                    held[component.device] += component.numpy().nbytes
            self.assertLen(held, 2 * model)
            if model == 1:
                self.assertEqual(set(held.values()), {whole / 2})
            else:
                # The bias of the row-parallel layer is on both ranks.
                more = 3 * 12 * 4 / 4
                self.assertEqual(set(held.values()), {whole / 4 + more})

    @parameterized.parameters(
        (1, "3.60 KB of 7.18 KB (ideal for 2 replicas: 3.59 KB)"),
        (2, "1.84 KB of 7.18 KB (ideal for 2 ranks of 2 replicas: 1.80 KB)"),
    )
    def test_the_summary_tells_it(self, model, text):
        lines = []
        tfscale.sharding_summary(
            sharded("adam", 2, model=model).model, print_fn=lines.append
        )
        self.assertIn(text, lines[0])

    def test_no_whole_slot_is_made(self):
        made = []

        def log(next_creator, **kwargs):
            variable = next_creator(**kwargs)
            made.append(variable)
            return variable

        strategy = tfscale.MeshStrategy(
            tfscale.device_mesh(data=2), zero_stage=1
        )
        with strategy.scope():
            model = optimizer_test.mlp()
            model.compile(OPTIMIZERS.Adam(), "mse")
            with tf.variable_creator_scope(log):
                model.optimizer.build(model.trainable_variables)
        shapes = [
            tuple(component.shape)
            for variable in made
            for component in getattr(variable, "values", [variable])
        ]
        self.assertGreaterEqual(len(shapes), 2 * 2 * 4)
        kernels = {shape for shape in shapes if len(shape) == 2}
        self.assertEqual(kernels, {(6, 24), (12, 12)})

    def test_of_gradients_no_more_than_a_part_is_sent(self):
        """Sums of whole gradients are nowhere in the graph of a step."""
        model = sharded("adam", 2).model
        graph = graph_of_step(model)
        sums = [op for op in graph.get_operations() if op.type == "AddN"]
        shapes = {tuple(op.outputs[0].shape) for op in sums}
        self.assertContainsSubset({(6, 24), (12, 12), (12,), (6,)}, shapes)
        self.assertNotIn((12, 24), shapes)
        self.assertNotIn((24, 12), shapes)

    def test_gradients_are_summed_on_the_devices_of_their_stages(self):
        """They were sent to the device of the first stage."""
        model = sharded("constrained", 2, 2, 1).model
        graph = graph_of_step(model)
        # Parts of kernels, of which the stages have one each.
        devices = {"(6, 24)": set(), "(12, 12)": set()}
        for op in graph.get_operations():
            shape = str(op.outputs[0].shape) if op.type == "AddN" else None
            if shape in devices:
                devices[shape].add(op.device[-5:])
        self.assertEqual(
            devices,
            {"(6, 24)": {"CPU:0", "CPU:2"}, "(12, 12)": {"CPU:1", "CPU:3"}},
        )


class LoopByHandTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(False, True)
    @pytest.mark.crossing(every=2)
    def test_has_the_numbers_of_one_device(self, autograph):
        x = same_numbers_test.JOBS["mlp_sgd"].data["x"]

        def train(strategy):
            same_numbers.reset()
            with strategy.scope():
                model = optimizer_test.mlp()
                optimizer = OPTIMIZERS.Adam(0.01, epsilon=1e-3)
                optimizer.build(model.trainable_variables)

            def step(x):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(tf.square(model(x) - x)) / 16
                variables = model.trainable_variables
                gradients = tape.gradient(loss, variables)
                optimizer.apply(gradients, variables)
                # Read by a replica a slot is whole.
                shapes.append(
                    tf.convert_to_tensor(optimizer._momentums[0]).shape
                )

            shapes = []
            run = tf.function(
                lambda x: strategy.run(step, args=(x,)), autograph=autograph
            )
            data = tf.data.Dataset.from_tensor_slices(x).batch(16)
            for batch in strategy.experimental_distribute_dataset(data):
                run(batch)
            self.assertEqual(set(map(tuple, shapes)), {(12, 24)})
            return [np.array(v) for v in model.variables + optimizer.variables]

        expected = train(tf.distribute.get_strategy())
        mesh = tfscale.device_mesh(data=2)
        actual = train(tfscale.MeshStrategy(mesh, zero_stage=1))
        for one, other in zip(expected, actual, strict=True):
            same_numbers.assert_close(other, one)

    def test_replicas_agree_on_averages_of_what_has_no_gradient(self):
        # 0.9 v + 0.1 v is not v to the last bit.
        strategy = tfscale.MeshStrategy(
            tfscale.device_mesh(data=2), zero_stage=1
        )
        with strategy.scope():
            model = optimizer_test.mlp()
            optimizer = OPTIMIZERS.SGD(
                0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=1
            )
            optimizer.build(model.trainable_variables)

        @tf.function(autograph=False)
        def run():
            def step():
                gradients = [tf.ones(v.shape) for v in model.variables]
                optimizer.apply([None, *gradients[1:]])

            strategy.run(step)

        with self.assertWarnsRegex(UserWarning, "Gradients do not exist"):
            for _ in range(3):
                run()
        for variable in model.trainable_variables:
            one, other = variable.value.values
            np.testing.assert_array_equal(one, other)

    def test_infinity_in_one_part_skips_the_step_of_all(self):
        strategy = tfscale.MeshStrategy(
            tfscale.device_mesh(data=2), zero_stage=1
        )
        with strategy.scope():
            model = optimizer_test.mlp()
            optimizer = optimizer_test.scaled(OPTIMIZERS.Adam(0.01))
            optimizer.build(model.trainable_variables)

        @tf.function(autograph=False)
        def run(bad):
            def step():
                gradients = [tf.ones(v.shape) for v in model.variables]
                # Row 9 is in the second replica's part.
                gradients[0] += tf.scatter_nd([[9, 3]], [bad], [12, 24])
                optimizer.apply(gradients)

            strategy.run(step)

        before = model.get_weights()
        run(tf.constant(np.inf, tf.float32))
        for value, found in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(found, value)
        self.assertEqual(np.array(optimizer.dynamic_scale), 512.0)
        run(tf.constant(0.0))
        for value, found in zip(before, model.get_weights(), strict=True):
            self.assertGreater(np.abs(found - value).min(), 0)


MESHES = {
    "plain": None,
    "data": ((2, 1), 0),
    "zero": ((2, 1), 1),
    "zero_3": ((3, 1), 1),
    "ranks": ((1, 2), 0),
    "zero_ranks": ((2, 2), 1),
}


class CheckpointTest(tf.test.TestCase, parameterized.TestCase):
    def model(self, name, make=MAKE["adam"]):
        same_numbers.reset()
        if MESHES[name] is None:
            strategy = tf.distribute.get_strategy()
        else:
            (data, model), stage = MESHES[name]
            strategy = tfscale.MeshStrategy(
                tfscale.device_mesh(data=data, model=model),
                LAYOUTS if model > 1 else None,
                zero_stage=stage,
            )
        with strategy.scope():
            model = optimizer_test.mlp()
            model.compile(make(), "mse")
            model.optimizer.build(model.trainable_variables)
        return model, strategy

    def assert_equal(self, one, other):
        pairs = zip(
            one.variables + one.optimizer.variables,
            other.variables + other.optimizer.variables,
            strict=True,
        )
        for expected, found in pairs:
            np.testing.assert_array_equal(np.array(found), np.array(expected))

    @parameterized.parameters(*MESHES)
    @pytest.mark.crossing(every=9)
    def test_what_parts_save_is_loaded(self, target):
        source = sharded("adam", 2).model
        folder = self.create_tempdir()
        path = os.path.join(folder, "model.keras")
        source.save(path)
        _, strategy = self.model(target)
        with strategy.scope():
            self.assert_equal(source, keras.models.load_model(path))

        path = tf.train.Checkpoint(
            model=source, optimizer=source.optimizer
        ).save(os.path.join(folder, "c"))
        model, _ = self.model(target)
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).restore(
            path
        ).assert_existing_objects_matched()
        self.assert_equal(source, model)

    @parameterized.parameters("plain", "data", "ranks")
    @pytest.mark.crossing(every=3)
    def test_what_others_save_is_loaded_in_parts(self, source):
        source, _ = self.model(source)
        source.optimizer.variables[2].assign(
            np.random.RandomState(0).randn(12, 24)
        )
        path = os.path.join(self.create_tempdir(), "model.keras")
        source.save(path)
        for name in ("zero", "zero_ranks"):
            _, strategy = self.model(name)
            with strategy.scope():
                model = keras.models.load_model(path)
            self.assert_equal(source, model)
            slot = model.optimizer.variables[2].value
            np.testing.assert_array_equal(
                slot.values[-1], np.array(slot)[6:, -slot.values[0].shape[1] :]
            )

    def test_a_model_can_be_exported(self):
        path = os.path.join(self.create_tempdir(), "exported")
        model = sharded("adam", 2).model
        model.export(path, verbose=False)
        x = np.ones((2, 12), "float32")
        exported = tf.saved_model.load(path)
        with tf.GradientTape() as tape:
            y = exported.serve(x)
        self.assertAllClose(y, model.predict(x, verbose=0))
        # It can be trained on: each weight's gradient is saved with it.
        weights = exported.trainable_variables
        for weight, gradient in zip(weights, tape.gradient(y, weights)):
            self.assertEqual(gradient.shape, weight.shape)


class RefusalTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(4, -1, 1.0, 3.0, True, "3", None)
    def test_a_stage_that_is_not_there(self, stage):
        with self.assertRaisesRegex(
            ValueError, f"`zero_stage` must be 0.*or 1.*zero_stage={stage!r}"
        ):
            tfscale.MeshStrategy(tfscale.device_mesh(data=2), zero_stage=stage)

    @parameterized.named_parameters(
        ("adafactor", OPTIMIZERS.Adafactor, "Adafactor, which needs"),
        ("lamb", OPTIMIZERS.Lamb, "Lamb, which needs whole"),
        ("muon", OPTIMIZERS.Muon, "Muon, which needs whole"),
        (
            "several",
            lambda: OPTIMIZERS.MultiOptimizer(
                OPTIMIZERS.OptimizerMap(OPTIMIZERS.SGD())
            ),
            "one optimizer for all variables.*MultiOptimizer",
        ),
        (
            "accumulation",
            lambda: OPTIMIZERS.SGD(gradient_accumulation_steps=2),
            "gradient_accumulation_steps.*GradientAccumulation",
        ),
        (
            "constraint_and_loss_scale",
            lambda: optimizer_test.scaled(OPTIMIZERS.SGD()),
            "constraint.*loss scaling.*up/kernel.*zero_stage",
        ),
    )
    def test_refuses(self, optimizer, message):
        strategy = tfscale.MeshStrategy(
            tfscale.device_mesh(data=2), zero_stage=1
        )
        with strategy.scope():
            model = constrained()
            model.compile(optimizer(), "mse")
        with self.assertRaisesRegex(ValueError, f"(?s){message}"):
            model.fit(**optimizer_test.DATA, verbose=0)

    def test_an_update_outside_of_replicas(self):
        strategy = tfscale.MeshStrategy(
            tfscale.device_mesh(data=2), zero_stage=1
        )
        with strategy.scope():
            model = optimizer_test.mlp()
            optimizer = OPTIMIZERS.Adam()
            optimizer.build(model.trainable_variables)
            gradients = [tf.ones(v.shape) for v in model.variables]
            with self.assertRaisesRegex(ValueError, "strategy.run"):
                optimizer.apply(gradients, model.trainable_variables)


if __name__ == "__main__":
    tf.test.main()
