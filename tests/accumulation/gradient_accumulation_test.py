"""With microbatches, `fit` has the numbers of the whole batch.

Of 33 rows in batches of 16 the last one has a single row: fewer than there are
microbatches, and none for the second replica.
"""

import collections
import copy
import dataclasses
import functools
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers
from tests import strategies
from tests.step import same_numbers_test as whole_batch
from tfscale.accumulation import accumulation_model
from tfscale.callbacks import GradientAccumulation
from tfscale.collectives import operations
from tfscale.variables import zero

X, Y, WEIGHTS = whole_batch.X, whole_batch.Y, whole_batch.WEIGHTS
# Gradients of biases are far from zero, so that they have correct digits.
DATA = dict(x=X, y=Y + 1.0, batch_size=16)
RTOL = 1e-6
SEQUENCES = np.random.RandomState(2).normal(size=(14, 4, 8)).astype("float32")


def clipped(**options):
    """Schedule, averages, clipping: all of which know of batches only."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 1, 0.5)
    return keras.optimizers.Adam(
        schedule,
        epsilon=1e-3,
        global_clipnorm=0.1,
        use_ema=True,
        ema_momentum=0.9,
        ema_overwrite_frequency=2,
        weight_decay=0.1,
        **options,
    )


class OwnStep(keras.Model):
    """Half of its loss is made without `compute_loss`."""

    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred, sample_weight)
            own = tf.reduce_mean(tf.square(y_pred))
            total = loss + own
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(total, weights), weights)
        return {"mine": own, **self.compute_metrics(x, y, y_pred)}


class OwnMetric(keras.Model):
    """As in Keras' example of a VAE: the metric has another name."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tracker = keras.metrics.Mean(name="total_loss")

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.tracker.update_state(tf.reduce_mean(tf.square(y_pred - y), -1))
        return {"loss": self.tracker.result(), "rows": 0.0 * loss}


class Unscaled(keras.Model):
    """Its loss does not pass through `optimizer.scale_loss`."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


ROWS = []


class CountsRows(keras.Model):
    def train_step(self, data):
        ROWS.append(int(data[0].shape[0]))
        return super().train_step(data)


class OwnCall(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(4, activation="tanh", name="a")
        self.out = keras.layers.Dense(3, name="b")

    def call(self, x, training=False):
        del training
        return self.out(self.hidden(x))


def half():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return whole_batch.dense()
    finally:
        keras.config.set_dtype_policy("float32")


class Ordered(keras.Model):
    """Its step returns two means, not in the order of their names."""

    def train_step(self, data):
        super().train_step(data)
        x, y = data
        return collections.OrderedDict(
            y=keras.ops.mean(y), x=keras.ops.mean(keras.ops.square(x))
        )


def own_step():
    plain = whole_batch.dense()
    return OwnStep(plain.input, plain.output)


def unscaled():
    plain = whole_batch.dense()
    return Unscaled(plain.input, plain.output)


def own_metric():
    plain = whole_batch.dense()
    return OwnMetric(plain.input, plain.output)


def own_call():
    model = OwnCall()
    model(X[:1])
    return model


def attending():
    x = keras.Input((4, 8))
    h = keras.layers.LayerNormalization(name="a")(x)
    h = keras.layers.MultiHeadAttention(2, 4, use_bias=False, name="b")(h, h)
    h = keras.layers.Dense(16, activation="gelu", name="c")(
        keras.layers.Add()([x, h])
    )
    return keras.Model(x, keras.layers.Dense(8, name="d")(h))


def scaled():
    return keras.optimizers.LossScaleOptimizer(clipped(), initial_scale=8.0)


def twice():
    return dict(metrics=["mae"], steps_per_execution=2)


JOBS = {
    **whole_batch.JOBS,
    "clipped": same_numbers.Job(
        whole_batch.dense,
        dict(DATA, sample_weight=WEIGHTS),
        clipped,
        loss=lambda: whole_batch.MSE(reduction="mean_with_sample_weight"),
    ),
    "scaled": same_numbers.Job(whole_batch.dense, DATA, scaled),
    "own_step": same_numbers.Job(own_step, DATA),
    "own_metric": same_numbers.Job(
        own_metric, dict(x=X[:16], y=Y[:16], batch_size=8)
    ),
    "unscaled": same_numbers.Job(unscaled, DATA),
    # XLA, as Keras does by itself on a GPU: once it refused microbatches of
    # different sizes, and batches whose rows are counted while they run.
    "compiled": same_numbers.Job(
        whole_batch.dense,
        DATA,
        clipped,
        compile=lambda: dict(jit_compile=True),
    ),
    "attending": same_numbers.Job(
        attending,
        dict(x=SEQUENCES, y=SEQUENCES[::-1], batch_size=6),
    ),
    "own_call": same_numbers.Job(own_call, DATA, compile=twice),
}
# Microbatches, replicas and model ranks. What is crossed with what else: see
# pairs_test.py.
ONE = (1, 1)
CROSSED = (
    ("clipped", 4, *ONE),
    ("clipped", 4, 2, 2),
    ("masked", 3, *ONE),
    ("masked", 4, 2, 2),
    ("own", 2, 2, 1),
    ("not_reduced", 4, *ONE),
    ("scaled", 4, 2, 1),
    ("own_step", 3, *ONE),
    ("own_call", 3, *ONE),
    ("validated", 3, *ONE),
    ("compiled", 3, *ONE),
)
# Slots, sums and weights divided over replicas; a sequence divided over model
# ranks.
DIVIDED = (
    ("clipped", dict(data=2, zero_stage=2)),
    ("clipped", dict(data=2, zero_stage=1)),
    ("clipped", dict(data=2, zero_stage=3)),
    ("scaled", dict(data=2, zero_stage=2)),
    ("unscaled", dict(data=2, zero_stage=2)),
    ("attending", dict(data=2, model=2, zero_stage=2)),
    ("attending", dict(data=2, model=2, zero_stage=3)),
    ("attending", dict(data=1, model=2, sequence_parallel=True)),
)


def accumulating(job, num_microbatches, num_replicas, num_ranks):
    callback = GradientAccumulation(num_microbatches)
    job = dataclasses.replace(job, fit=dict(job.fit, callbacks=[callback]))
    if num_replicas * num_ranks > 1:
        layouts = {} if num_ranks == 1 else None
        return same_numbers.on_ranks(job, num_ranks, num_replicas, layouts)
    return same_numbers.plain(job)


class SameNumbersTest(parameterized.TestCase):
    @parameterized.parameters(*CROSSED)
    @pytest.mark.crossing(every=18)
    def test_whole_batch(self, name, *sizes):
        expected = _on_one_device(name)
        actual = accumulating(JOBS[name], *sizes)
        same_numbers.assert_same(self, expected, actual, RTOL)
        self.assertIs(actual.model.__class__, expected.model.__class__)

    @parameterized.parameters(*DIVIDED)
    @pytest.mark.crossing(every=8)
    def test_what_is_divided(self, name, options):
        expected = _on_one_device(name)
        job, options = JOBS[name], dict(options)
        job = dataclasses.replace(
            job, fit=dict(callbacks=[GradientAccumulation(3)])
        )
        mesh = tfscale.device_mesh(
            data=options.pop("data"), model=options.pop("model", 1)
        )
        layout_map = None
        if mesh.shape[mesh.axis_names.index("model")] > 1:
            layout_map = same_numbers.layout_map_for(job, mesh)
        strategy = tfscale.MeshStrategy(mesh, layout_map, **options)
        with mock.patch.object(zero, "MIN_ELEMENTS", 2):
            actual = same_numbers.plain(job, strategy)
        same_numbers.assert_same(self, expected, actual, RTOL)

    @parameterized.parameters((1, (12, 8)), (2, (6, 8)))
    @pytest.mark.crossing(every=2)
    def test_sums_are_shards_with_stage_2(self, zero_stage, shape):
        initial = []

        def run(step, microbatches):
            initial.extend(step.initial)
            run_microbatches(step, microbatches)

        run_microbatches = accumulation_model.run_microbatches
        same_numbers.reset()
        strategy = tfscale.MeshStrategy(
            tfscale.device_mesh(data=2), zero_stage=zero_stage
        )
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((12,)), keras.layers.Dense(8, use_bias=False)]
            )
            model.compile(keras.optimizers.SGD(momentum=0.9), "mse")
        accumulation = GradientAccumulation(2)
        with mock.patch.object(accumulation_model, "run_microbatches", run):
            model.fit(
                np.ones((8, 12)),
                np.ones((8, 8)),
                verbose=0,
                callbacks=[accumulation],
            )
        sums = [tuple(x.shape) for x in initial if x.shape.rank == 2]
        self.assertEqual(sums, [shape] * 2)

    @pytest.mark.crossing
    def test_weights_in_shards_need_no_scaled_loss(self):
        """Gradients of shards count by rows as they are summed."""
        found = []
        for data in (1, 2):
            same_numbers.reset()
            zero_stage = 3 if data > 1 else 0
            strategy = tfscale.MeshStrategy(
                tfscale.device_mesh(data=data), zero_stage=zero_stage
            )
            with strategy.scope(), mock.patch.object(zero, "MIN_ELEMENTS", 2):
                model = unscaled()
                model.compile("sgd", "mse")
                model.fit(
                    X,
                    Y,
                    shuffle=False,
                    verbose=0,
                    callbacks=[GradientAccumulation(2)] * (data > 1),
                )
            found.append(model.get_weights())
        for one, other in zip(*found, strict=True):
            same_numbers.assert_close(other, one)

    def test_gradients_are_summed_once_for_each_update(self):
        """However many microbatches there are, and in no loop."""
        sums = []

        def summing(tensors, **options):
            graph = tensors[0].graph
            sums.append((tensors[0].shape.as_list(), graph.name))
            return all_reduce(tensors, **options)

        all_reduce = operations.all_reduce
        with mock.patch.object(operations, "all_reduce", summing):
            found = accumulating(JOBS["not_reduced"], 4, 2, 1)
        weights = found.model.trainable_variables
        # Divisors and rows, on trial; then the gradients.
        expected = [[4], *(list(weight.shape) for weight in weights)]
        self.assertEqual([shape for shape, _ in sums], expected)
        for _, graph in sums:
            self.assertNotIn("while", graph)

    @pytest.mark.crossing
    def test_mirrored_strategy(self):
        """Keras' own accumulation raises a RuntimeError there."""
        job = dataclasses.replace(
            JOBS["own"], fit=dict(callbacks=[GradientAccumulation(3)])
        )
        strategy = strategies.mirrored()
        actual = same_numbers.plain(job, strategy)
        same_numbers.assert_same(self, _on_one_device("own"), actual, RTOL)

    @parameterized.parameters((3, 1, 1), (2, 2, 1))
    @pytest.mark.crossing(every=2)
    def test_moving_statistics_are_those_of_the_batch(self, *sizes):
        def build():
            x = keras.Input((5,))
            h = keras.layers.BatchNormalization(momentum=0.5, name="a")(x)
            return keras.Model(x, keras.layers.Dense(3, name="b")(h))

        job = same_numbers.Job(build, DATA)
        expected = same_numbers.on_one_device(job).variables
        found = accumulating(job, *sizes).variables
        for name in ("a/moving_mean", "a/moving_variance"):
            same_numbers.assert_close(found[name], expected[name], name)

    def test_sums_are_float32_in_mixed_precision(self):
        job = same_numbers.Job(half, DATA)
        eagerly = dataclasses.replace(
            job, compile=lambda: dict(run_eagerly=True)
        )
        expected = same_numbers.plain(eagerly)
        actual = accumulating(job, 4, 1, 1)
        same_numbers.assert_same(self, expected, actual, 2e-3)
        self.assertIsInstance(
            actual.model.optimizer, keras.optimizers.LossScaleOptimizer
        )

    def test_a_microbatch_has_the_range_of_numbers_of_the_batch(self):
        """As a mean of its own it left that of half precision 16 times sooner.

        Steps were left out that the whole batch makes.
        """
        job = same_numbers.Job(
            half,
            dict(x=X, y=Y, batch_size=16),
            lambda: keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.05), initial_scale=2.0**16
            ),
            compile=lambda: dict(run_eagerly=True),
        )
        expected, actual = same_numbers.plain(job), accumulating(job, 16, 1, 1)
        for outcome in (expected, actual):
            optimizer = outcome.model.optimizer
            self.assertEqual(int(optimizer.iterations), 3)
            self.assertEqual(float(optimizer.dynamic_scale), 2.0**16)

    def test_what_train_step_returns_is_averaged_by_rows(self):
        expected = _on_one_device("own_step").logs["mine"]
        same_numbers.assert_close(
            accumulating(JOBS["own_step"], 3, 1, 1).logs["mine"], expected
        )

    def test_results_of_metrics_are_not_averaged(self):
        # A result that was returned by another name than that of its metric
        # was: a mean of those after each microbatch.
        expected = _on_one_device("own_metric").logs["loss"]
        same_numbers.assert_close(
            accumulating(JOBS["own_metric"], 3, 1, 1).logs["loss"], expected
        )

    def test_an_ordered_dict_keeps_its_order(self):
        # Names were sorted and values were not: each had that of another.
        def history(*callbacks):
            same_numbers.reset()
            plain = whole_batch.dense()
            model = Ordered(plain.input, plain.output)
            model.compile("sgd", "mse")
            return model.fit(
                X[:32],
                Y[:32],
                16,
                verbose=0,
                callbacks=callbacks,
                shuffle=False,
            ).history

        expected, found = history(), history(GradientAccumulation(4))
        self.assertEqual(list(found), list(expected))
        for name, value in expected.items():
            same_numbers.assert_close(found[name], value, name)


class AsEverTest(parameterized.TestCase):
    """Behind `fit` a model does what it did before, and is of its class."""

    def setUp(self):
        super().setUp()
        same_numbers.reset()
        plain = whole_batch.dense()
        self.model = CountsRows(plain.input, plain.output)
        self.model.compile("sgd", "mse", run_eagerly=True)
        self.fit = functools.partial(
            self.model.fit, X, Y, batch_size=16, verbose=0
        )

    def assert_plain(self):
        self.assertIs(self.model.__class__, CountsRows)
        self.assertIs(self.model.optimizer.__class__, keras.optimizers.SGD)
        copied = copy.copy(self.model.optimizer)
        self.assertIs(type(copied), keras.optimizers.SGD)
        ROWS.clear()
        self.fit()
        self.assertEqual(ROWS, [16, 16, 1])
        self.model.train_on_batch(X, Y)
        self.assertEqual(ROWS[3:], [33])

    def test_after_an_exception_in_mid_epoch(self):
        def fail(batch, logs):
            raise KeyboardInterrupt

        failing = keras.callbacks.LambdaCallback(on_train_batch_end=fail)
        with self.assertRaises(KeyboardInterrupt):
            self.fit(callbacks=[GradientAccumulation(4), failing])
        self.assertEqual(int(self.model.optimizer.iterations), 1)
        self.assert_plain()

    def test_after_fit_and_in_evaluate(self):
        accumulation = GradientAccumulation(4)
        self.fit(callbacks=[accumulation], epochs=2)
        self.assertEqual(int(self.model.optimizer.iterations), 6)
        self.model.evaluate(X, Y, verbose=0, callbacks=[accumulation])
        self.assert_plain()
        self.fit(callbacks=[accumulation])
        # On trial the whole batch, then each microbatch.
        self.assertEqual(ROWS[4:], [16, *[4] * 4] * 2 + [1, 1])

    def test_later_steps_are_those_of_a_model_that_never_did(self):
        self.fit(callbacks=[GradientAccumulation(4)])
        plain = whole_batch.dense()
        other = CountsRows(plain.input, plain.output)
        other.compile("sgd", "mse", run_eagerly=True)
        other.set_weights(self.model.get_weights())
        models = self.model, other
        for model in models:
            model.fit(X, Y, batch_size=16, verbose=0, shuffle=False)
        for one, another in zip(*(model.get_weights() for model in models)):
            np.testing.assert_array_equal(one, another)


class TwoOptimizers(OwnStep):
    def train_step(self, data):
        self.others["second"].apply(
            [tf.zeros_like(w) for w in self.trainable_variables],
            self.trainable_variables,
        )
        return super().train_step(data)


ELSEWHERE = [[]]


class KeptElsewhere(keras.Model):
    """Of this one nobody knows: it once updated for each microbatch."""

    def train_step(self, data):
        logs = super().train_step(data)
        weights = self.trainable_variables
        ELSEWHERE[0][0].apply([tf.ones_like(w) for w in weights], weights)
        return logs


class OnlyElsewhere(keras.Model):
    def train_step(self, data):
        weights = self.trainable_variables
        ELSEWHERE[0][0].apply([tf.ones_like(w) for w in weights], weights)
        return {}


class Adversarial(keras.Model):
    """Two optimizers by turns, as GANs have them."""

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        for optimizer in (self.others["second"], self.optimizer):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            weights = self.trainable_variables
            gradients = tape.gradient(loss, weights)
            optimizer.apply_gradients(zip(gradients, weights))
        return {"loss": loss}


class Assigns(keras.Model):
    def train_step(self, data):
        logs = super().train_step(data)
        for weight in self.trainable_variables:
            weight.assign(tf.clip_by_value(weight.value, -1.0, 1.0))
        return logs


class Twice(keras.Model):
    def train_step(self, data):
        super().train_step(data)
        return super().train_step(data)


class Differing(keras.Model):
    """Has one more loss after the trial of two replicas."""

    num_traces = 0

    def train_step(self, data):
        self.num_traces += 1
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = keras.ops.mean(y_pred)
            if self.num_traces > 2:
                loss += self.compute_loss(x, y, y_pred)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {}


class NeverApplied(keras.Model):
    def train_step(self, data):
        return {"loss": tf.reduce_mean(self(data[0], training=True))}


class InFunction(keras.Model):
    @tf.function
    def train_step(self, data):
        return super().train_step(data)


def spectral(x, y):
    """Its kernel is assigned to in each call, which ended in an AttributeError.

    There, a weight had no handle.
    """
    dense = keras.layers.Dense(3, name="dense")
    layer = keras.layers.SpectralNormalization(dense, name="spectral")
    return keras.Model(x, layer(y))


def _accumulating_twice():
    return keras.optimizers.SGD(gradient_accumulation_steps=2)


class BadInputTest(parameterized.TestCase):
    @parameterized.parameters("4", 2.0, True, None)
    def test_number_is_an_int(self, count):
        with self.assertRaisesRegex(TypeError, f"num_microbatches={count!r}"):
            GradientAccumulation(count)

    def test_number_is_positive(self):
        with self.assertRaisesRegex(ValueError, "1 or more"):
            GradientAccumulation(0)

    @parameterized.parameters(
        (TwoOptimizers, "sgd", "call of another optimizer"),
        (Adversarial, "sgd", "call of another optimizer, 'second'"),
        (KeptElsewhere, "sgd", "another optimizer, 'elsewhere'"),
        (OnlyElsewhere, "sgd", "never applied"),
        (Assigns, "sgd", "an `assign` to 'a/kernel'"),
        (spectral, "sgd", "an `assign` to 'spectral/dense/kernel'"),
        (Twice, "sgd", "a second call of its `apply`"),
        (NeverApplied, "sgd", "never applied"),
        (InFunction, "sgd", "inside of a `tf.function`"),
        (keras.Model, _accumulating_twice, "Received: both"),
        (keras.Model, None, "compiled without one"),
        (keras.Model, "sgd", "num_microbatches=17 and batches of 16 rows", 17),
    )
    def test_nothing_is_changed(self, kind, optimizer, message, count=4):
        self.assert_refused(kind, optimizer, message, count)

    @parameterized.parameters(
        (Adversarial, "sgd", "call of another optimizer, 'second'", 4),
        (Twice, "sgd", "a second call of its `apply`", 4),
        (NeverApplied, "sgd", "never applied", 4),
        (keras.Model, _accumulating_twice, "Received: both", 4),
        (keras.Model, "sgd", "=9 and batches of 8 rows .of each replica", 9),
        # Keras took it for the end of the data, and nothing was trained.
        (Differing, "sgd", "more losses than in its first trace", 4),
    )
    def test_nothing_is_changed_on_replicas(self, *arguments):
        mesh = tfscale.device_mesh(data=2)
        strategy = tfscale.MeshStrategy(mesh, zero_stage=1)
        self.assert_refused(*arguments, strategy)

    def assert_refused(self, kind, optimizer, message, count, strategy=None):
        same_numbers.reset()
        strategy = strategy or tf.distribute.get_strategy()
        with strategy.scope():
            ELSEWHERE[0][:] = [keras.optimizers.SGD(name="elsewhere")]
            plain = whole_batch.dense()
            model = kind(plain.input, plain.output)
            made = type(model)
            optimizer = optimizer() if callable(optimizer) else optimizer
            model.others = {"second": keras.optimizers.SGD(name="second")}
            model.compile(optimizer, "mse")
        before = [np.array(v) for v in model.variables]
        with self.assertRaisesRegex(ValueError, message):
            model.fit(
                *(X[:16], Y[:16]),
                batch_size=16,
                verbose=0,
                callbacks=[GradientAccumulation(count)],
            )
        for variable, value in zip(model.variables, before, strict=True):
            np.testing.assert_array_equal(variable, value)
        self.assertIs(model.__class__, made)

    @parameterized.parameters(
        (lambda: keras.optimizers.SGD(clipnorm=1.0), "that clips"),
        (scaled, "a LossScaleOptimizer"),
    )
    def test_mirrored_strategy_sums_last(self, optimizer, message):
        same_numbers.reset()
        with strategies.mirrored().scope():
            model = whole_batch.dense()
            model.compile(optimizer(), "mse")
        with self.assertRaisesRegex(
            ValueError, f"{message}.*Use `tfscale.MeshStrategy`"
        ):
            model.fit(X, Y, verbose=0, callbacks=[GradientAccumulation(4)])

    def test_a_strategy_without_replicas_of_its_own(self):
        # "destinations can not be empty", in the first step.
        kind = tf.distribute.experimental.CentralStorageStrategy
        with kind(["CPU:0"]).scope():
            model = whole_batch.dense()
            model.compile("sgd", "mse")
        with self.assertRaisesRegex(TypeError, "CentralStorageStrategy"):
            model.fit(X, Y, verbose=0, callbacks=[GradientAccumulation(2)])

    def test_synchronized_layers_are_refused(self):
        model = keras.Sequential(
            [keras.layers.BatchNormalization(synchronized=True)]
        )
        model.compile("sgd", "mse")
        with self.assertRaisesRegex(ValueError, "synchronized=True"):
            model.fit(X, X, verbose=0, callbacks=[GradientAccumulation(4)])

    def test_tensors_of_several_numbers_of_rows_are_refused(self):
        # As of nodes and edges: rows of the longer ones were lost.
        nodes, edges = keras.Input((4,)), keras.Input((4,))
        model = keras.Model([nodes, edges], keras.layers.Dense(1)(nodes))
        model.compile("sgd", "mse")
        batch = (np.ones((8, 4)), np.ones((20, 4))), np.ones((8, 1))
        four, one = tf.TensorSpec([None, 4]), tf.TensorSpec([None, 1])
        dataset = tf.data.Dataset.from_generator(
            lambda: [batch], output_signature=((four, four), one)
        )
        with self.assertRaisesRegex(
            tf.errors.InvalidArgumentError, r"one number of rows.*\[8 20 8\]"
        ):
            model.fit(dataset, verbose=0, callbacks=[GradientAccumulation(4)])

    def test_stateful_layers_are_refused(self):
        # Keras expected another batch size.
        layer = keras.layers.GRU(3, stateful=True)
        model = keras.Sequential([keras.Input((1, 4), batch_size=8), layer])
        model.compile("sgd", "mse")
        x = np.zeros((8, 1, 4), "float32")
        with self.assertRaisesRegex(ValueError, "stateful=True"):
            model.fit(
                x, x[:, 0, :3], callbacks=[GradientAccumulation(4)], verbose=0
            )

    def test_a_pipeline_is_refused(self):
        with tfscale.MeshStrategy(tfscale.device_mesh(pipeline=2)).scope():
            model = tfscale.PipelineModel(whole_batch.dense(), 4)
            model.compile("sgd", "mse")
        with self.assertRaisesRegex(ValueError, "accumulates by itself"):
            model.fit(X, Y, verbose=0, callbacks=[GradientAccumulation(4)])


_FOUND = {}


def _on_one_device(name):
    if name not in _FOUND:
        _FOUND[name] = same_numbers.on_one_device(JOBS[name])
    return _FOUND[name]
