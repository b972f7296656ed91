"""BatchNormalization: by microbatch, its moving averages by batch."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers
from tests.collectives import operations_test
from tests.step import batch_norm_test
from tfscale.pipeline import PipelineModel

RANDOM = np.random.RandomState(0)
ROWS = 34
FEATURES = RANDOM.normal(2.0, 3.0, (ROWS, 6)).astype("float32")
SEQUENCES = RANDOM.normal(2.0, 3.0, (ROWS, 5, 6)).astype("float32")
LENGTHS = RANDOM.randint(1, 6, ROWS)
MASKED = SEQUENCES * (np.arange(5) < LENGTHS[:, None])[..., None]
TARGETS = RANDOM.normal(size=(ROWS, 3)).astype("float32")


def optimizer():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def two_norms():
    inputs = keras.Input((6,))
    x = keras.layers.Dense(5, use_bias=False, name="a")(inputs)
    x = keras.layers.BatchNormalization(momentum=0.8, name="n1")(x)
    x = keras.layers.Dense(4, "tanh", name="b")(x)
    x = keras.layers.BatchNormalization(momentum=0.9, name="n2")(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="c")(x))


def masked_norm():
    inputs = keras.Input((5, 6))
    x = keras.layers.Masking()(inputs)
    x = keras.layers.Dense(4, "tanh", name="b")(x)
    x = keras.layers.BatchNormalization(momentum=0.8, name="n1")(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="c")(x))


def frozen_averages():
    inputs = keras.Input((6,))
    x = keras.layers.Dense(5, name="a")(inputs)
    x = keras.layers.BatchNormalization(
        momentum=1.0, moving_mean_initializer="random_normal"
    )(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="c")(x))


def shared_norm():
    norm = keras.layers.BatchNormalization(momentum=0.8, name="n1")
    inputs = keras.Input((6,))
    x = norm(inputs)
    x = norm(keras.layers.Dense(6, "tanh", name="b")(x))
    return keras.Model(inputs, keras.layers.Dense(3, name="c")(x))


def renormalizing():
    inputs = keras.Input((6,))
    x = keras.layers.BatchNormalization(renorm=True, name="n1")(inputs)
    x = keras.layers.Dense(6, "tanh", name="b")(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="c")(x))


def job(build, x=FEATURES):
    return same_numbers.Job(
        build, dict(x=x, y=TARGETS, batch_size=16), optimizer
    )


def parts(rows, count):
    """Sizes that differ by one at most, the larger ones first."""
    return [rows // count + (i < rows % count) for i in range(count)]


def microbatches(num_microbatches, num_replicas):
    """Slices of rows, for each batch of 16 the microbatches of all replicas."""
    for start in range(0, ROWS, 16):
        sizes = [
            size
            for replica in parts(min(16, ROWS - start), num_replicas)
            for size in parts(replica, num_microbatches)
        ]
        stops = list(itertools.accumulate(sizes, initial=start))
        yield [
            slice(*ends)
            for ends in itertools.pairwise(stops)
            if ends[0] < ends[1]
        ]


def by_hand(model, x, batches, masks=None):
    """Trains with gradients summed over microbatches, by plain Keras.

    Moving averages get mean and variance of the input of each layer, over all
    rows of the batch.
    """
    norms = [
        layer
        for layer in model.layers
        if isinstance(layer, keras.layers.BatchNormalization)
    ]
    # With a mask, the input of a layer is two tensors.
    fed = [keras.tree.flatten(norm.input)[0] for norm in norms]
    probe = keras.Model(model.inputs[0], fed + model.outputs)
    updates = optimizer()
    for batch in batches:
        rows = sum(part.stop - part.start for part in batch)
        total, seen = None, []
        old = [
            (np.array(n.moving_mean), np.array(n.moving_variance))
            for n in norms
        ]
        for part in batch:
            with tf.GradientTape() as tape:
                *inputs, y = probe(x[part], training=True)
                share = (part.stop - part.start) / rows
                loss = share * tf.reduce_mean(tf.square(y - TARGETS[part]))
            found = tape.gradient(loss, model.trainable_variables)
            total = [a + b for a, b in zip(total, found)] if total else found
            seen.append([np.array(i, np.float64) for i in inputs])
            # The next microbatch is to find them as they were.
            for norm, (mean, variance) in zip(norms, old):
                norm.moving_mean.assign(mean)
                norm.moving_variance.assign(variance)
        updates.apply(total, model.trainable_variables)
        for norm, (mean, variance), values in zip(norms, old, zip(*seen)):
            values = np.concatenate(values)
            if masks is not None:
                whole = slice(batch[0].start, batch[-1].stop)
                values = values[masks[whole]]
            values = values.reshape(-1, values.shape[-1])
            k = norm.momentum
            norm.moving_mean.assign(k * mean + (1 - k) * values.mean(0))
            norm.moving_variance.assign(k * variance + (1 - k) * values.var(0))
    return model


class StatisticsTest(parameterized.TestCase):
    @parameterized.parameters(
        (3, 3, 1, False), (3, 3, 1, True), (2, 2, 2, False), (1, 2, 1, False)
    )
    @pytest.mark.crossing(every=4)
    def test_moving_averages_are_those_of_the_whole_batch(
        self, num_stages, num_microbatches, num_replicas, recompute
    ):
        cuts = ["b", "n2"][: num_stages - 1]
        many = same_numbers.on_mesh(
            job(two_norms),
            num_stages,
            num_microbatches,
            num_replicas,
            balance=cuts,
            recompute=recompute,
        )
        self.compare(
            two_norms, many, microbatches(num_microbatches, num_replicas)
        )

    @pytest.mark.crossing
    def test_of_a_masked_batch_only_what_the_mask_leaves_counts(self):
        many = same_numbers.on_mesh(
            job(masked_norm, MASKED), 2, 3, balance=["n1"]
        )
        self.compare(
            masked_norm,
            many,
            microbatches(3, 1),
            MASKED,
            np.arange(5) < LENGTHS[:, None],
        )

    def compare(self, build, many, batches, x=FEATURES, masks=None):
        same_numbers.reset()
        expected = by_hand(build(), x, batches, masks)
        for variable in expected.variables:
            same_numbers.assert_close(
                many.variables[variable.path],
                np.array(variable),
                variable.path,
                initial=many.initial[variable.path],
            )

    @parameterized.parameters(two_norms, shared_norm, renormalizing)
    @pytest.mark.crossing
    def test_with_one_microbatch_it_is_plain_keras(self, build):
        # No batch is smaller than the others: half the traces.
        whole = dict(x=FEATURES[:32], y=TARGETS[:32], batch_size=16)
        norms = same_numbers.Job(build, whole, optimizer)
        one = same_numbers.on_one_device(norms)
        many = same_numbers.on_mesh(norms, 2, 1, balance=["b"])
        same_numbers.assert_same(self, one, many)

    @parameterized.parameters((1, 2), (2, 3))
    @pytest.mark.crossing
    def test_a_momentum_of_one_keeps_averages(self, num_replicas, count):
        # The moving variance was 0 / 0. Some microbatches have no rows.
        many = same_numbers.on_mesh(
            job(frozen_averages), 2, count, num_replicas, balance=["c"]
        )
        averages = [path for path in many.variables if "/moving_" in path]
        self.assertLen(averages, 2)
        for path in averages:
            np.testing.assert_array_equal(
                many.variables[path], many.initial[path]
            )

    @parameterized.parameters((3, 1), (2, 2))
    @pytest.mark.crossing(every=2)
    def test_those_of_any_layer_are_of_the_batch(self, count, num_replicas):
        # One called twice, one that renormalizes, one of masked rows. Of the
        # last batch, one row, microbatches and a replica have none.
        job = same_numbers.Job(
            batch_norm_test.side_by_side,
            batch_norm_test.DATA,
            lambda: keras.optimizers.SGD(0.0),
        )
        expected = same_numbers.on_one_device(job)
        actual = same_numbers.on_mesh(job, 2, count, num_replicas)
        for path, value in expected.variables.items():
            same_numbers.assert_close(actual.variables[path], value, path)

    def test_those_of_a_stage_are_one_tensor_for_replicas(self):
        mesh = tfscale.device_mesh(data=2, pipeline=2)
        strategy = tfscale.MeshStrategy(mesh)
        with strategy.scope():
            model = PipelineModel(two_norms(), 2, balance=["b"])
            model.compile(optimizer(), "mse")
        model.test_on_batch(FEATURES, TARGETS)
        data = FEATURES.reshape(2, 17, 6), TARGETS.reshape(2, 17, 3)
        batch = [
            strategy.experimental_distribute_values_from_function(
                lambda context, x=x: tf.constant(
                    x[context.replica_id_in_sync_group]
                )
            )
            for x in data
        ]
        sums = operations_test.sums_of(
            lambda: strategy.run(model.train_step, args=(batch,))
        )
        # On both devices of each stage: of 5 channels and of 4.
        found = sorted(shape for shape in sums if len(shape) == 3)
        self.assertEqual(found, [[2, 3, 4]] * 2 + [[2, 3, 5]] * 2)

    def test_synchronized_layers_are_refused(self):
        strategy = tfscale.MeshStrategy(tfscale.device_mesh(pipeline=2))
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((6,)),
                    keras.layers.Dense(3),
                    keras.layers.BatchNormalization(
                        synchronized=True, name="norm"
                    ),
                ]
            )
            with self.assertRaisesRegex(
                ValueError, "layer 'norm' with synchronized=True. Use sync"
            ):
                PipelineModel(model, 2)
