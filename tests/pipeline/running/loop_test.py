"""A schedule in a loop gives the numbers that it gives written out, bit by bit.

Rows here are what could differ: in a loop, what belongs to a microbatch goes
through registers and arrays.
"""

import contextlib
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers
from tfscale.pipeline import PipelineModel
from tfscale.pipeline.running import loop
from tfscale.pipeline.running.executor import Executor
from tfscale.pipeline.tracing import keys
from tfscale.schedules import steady

RANDOM = np.random.RandomState(0)
# In batches of 16: the last one has fewer rows than microbatches.
TOKENS = RANDOM.randint(1, 5, (36, 6))
LABELS = RANDOM.randint(0, 3, 36)


class Drops(keras.layers.Layer):
    def __init__(self, generator):
        super().__init__()
        self.seed_generator = generator

    def call(self, x, training=False):
        if not training:
            return x
        return keras.random.dropout(x, 0.3, seed=self.seed_generator)


def build():
    """Masks, dropout, BatchNormalization, an added loss, a skip, an output."""
    tokens = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(5, 8, mask_zero=True)(tokens)
    x = keras.layers.Dense(8, "tanh", activity_regularizer="l2")(x)
    x = skip = keras.layers.Dropout(0.3)(x)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Dense(8, "tanh", name="cut")(x)
    x = keras.layers.GaussianDropout(0.3)(x)
    x = keras.layers.Add()([x, skip])
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(tokens, keras.layers.Dense(3, name="logits")(x))


def build_dense():
    x = inputs = keras.Input((6,))
    for name in ("a", "b", "c", "d"):
        x = keras.layers.Dense(8, "tanh", name=name)(x)
    return keras.Model(inputs, keras.layers.Dense(3)(x))


class OwnLoss(keras.Model):
    def compute_loss(self, x, y, y_pred, sample_weight):
        del x, sample_weight
        y = keras.ops.cast(y, y_pred.dtype)[:, None]
        loss = keras.ops.mean(keras.ops.square(y_pred - y))
        return loss + sum(self.losses)


def job(build=build, **compile_arguments):
    def with_own_loss():
        model = build()
        return OwnLoss(model.inputs, model.outputs)

    own = compile_arguments.pop("own_loss", False)
    x = TOKENS if build is globals()["build"] else TOKENS.astype("float32")
    return same_numbers.Job(
        with_own_loss if own else build,
        dict(x=x, y=LABELS, batch_size=16),
        lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        lambda: {"metrics": ["accuracy"], **compile_arguments},
    )


@contextlib.contextmanager
def written_out():
    """Within it, nothing runs in a loop."""

    def find_loops(actions, *_):
        return [steady.Repeated(tuple(actions))]

    with mock.patch.object(steady, "find_loops", find_loops):
        yield


@contextlib.contextmanager
def counted():
    """Within it, the loops that are written are added to a list."""
    with mock.patch.object(loop, "run", side_effect=loop.run) as run:
        yield run


class LoopTest(parameterized.TestCase):
    def check(self, job, *sizes, **options):
        with counted() as run:
            looped = same_numbers.on_mesh(job, *sizes, **options)
        self.assertGreater(run.call_count, 0)
        with written_out():
            plain = same_numbers.on_mesh(job, *sizes, **options)
        same_numbers.assert_equal(self, plain, looped)
        self.assertEqual(plain.logs, looped.logs)

    @parameterized.named_parameters(
        ("one_stage", (1, 8), {}),
        ("two_stages", (2, 9), {}),
        ("recomputed", (2, 9), dict(recompute=True)),
        ("gpipe", (2, 9), dict(schedule="gpipe")),
        ("weights_apart", (2, 9), dict(schedule="zb_h1")),
        ("weights_apart_again", (2, 9), dict(schedule="zb_h1", recompute=True)),
        ("v", (2, 16), dict(schedule="zb_v")),
        ("interleaved", (2, 16), dict(schedule="interleaved")),
        ("replicas", (2, 9, 2), {}),
    )
    @pytest.mark.crossing(every=9)
    def test_state_masks_and_what_layers_add(self, sizes, options):
        self.check(job(), *sizes, **options)

    @pytest.mark.crossing
    def test_model_ranks(self):
        self.check(
            job(build_dense),
            *(2, 9, 1, 2),
            layouts={
                "[ac]/kernel": (None, "model"),
                "[bd]/kernel": ("model", None),
            },
        )

    @pytest.mark.crossing
    def test_stages_that_xla_compiles(self):
        self.check(job(build_dense, jit_compile=True), 2, 9)

    @pytest.mark.crossing
    def test_a_loss_of_the_user(self):
        self.check(job(build_dense, own_loss=True), 2, 9)

    @parameterized.parameters((1, 8, "1f1b"), (2, 9, "gpipe"))
    @pytest.mark.crossing
    def test_an_input_may_be_an_output(self, stages, microbatches, schedule):
        # The last stage made it again, and loops took it for made only there:
        # the first stage read what nobody had written, or had a KeyError.
        def build_passing():
            model = build_dense()
            outputs = {"logits": model.output, "passed": model.input}
            return keras.Model(model.input, outputs)

        passing = same_numbers.Job(
            build_passing,
            dict(
                x=TOKENS.astype("float32"),
                y={"logits": LABELS, "passed": TOKENS.astype("float32")},
                batch_size=16,
            ),
            lambda: keras.optimizers.SGD(0.05, momentum=0.9),
            lambda: {
                "logits": keras.losses.SparseCategoricalCrossentropy(True),
                "passed": keras.losses.MeanSquaredError(),
            },
            lambda: {"metrics": {"passed": ["mae"]}},
        )
        self.check(passing, stages, microbatches, schedule=schedule)

    @parameterized.product(schedule=("gpipe", "1f1b"), num_microbatches=(2, 8))
    @pytest.mark.crossing
    def test_layers_of_several_stages_may_share_a_generator(
        self, schedule, num_microbatches
    ):
        # A backward computed its forward again with the masks of the last
        # stage, and in a loop it was "min() arg is an empty sequence".
        def weights(recompute):
            same_numbers.reset()
            strategy = tfscale.MeshStrategy(tfscale.device_mesh(pipeline=2))
            with strategy.scope():
                generator = keras.random.SeedGenerator(5)
                layers = [keras.Input((6,))]
                for name in "abc":
                    layers.append(keras.layers.Dense(6, name=name))
                    layers.append(Drops(generator))
                model = PipelineModel(
                    keras.Sequential(layers),
                    num_microbatches,
                    schedule,
                    balance=["b"],
                    recompute=recompute,
                )
                model.compile("sgd", "mse")
            x = TOKENS[:32].astype("float32")
            model.fit(x, x, batch_size=16, shuffle=False, verbose=0)
            calls = 3 * num_microbatches * 2
            np.testing.assert_array_equal(generator.state, [5, calls])
            return [np.array(v) for v in model.trainable_variables]

        for found, expected in zip(weights(True), weights(False), strict=True):
            same_numbers.assert_close(found, expected)

    @pytest.mark.crossing
    def test_a_layer_that_fails_is_named(self):
        same_numbers.reset()
        strategy = tfscale.MeshStrategy(tfscale.device_mesh(pipeline=2))
        with strategy.scope():
            tokens = keras.Input((6,), dtype="int32")
            x = keras.layers.Embedding(5, 8)(tokens)
            x = keras.layers.Flatten(name="cut")(x)
            model = keras.Model(tokens, keras.layers.Dense(3)(x))
            model = PipelineModel(model, 9, balance=["cut"])
            model.compile("sgd", "mse")
        wrong = TOKENS[:16].copy()
        wrong[9] = 7
        with (
            counted() as run,
            self.assertRaisesRegex(
                tf.errors.InvalidArgumentError,
                "(?s)Layer 'embedding' of pipeline stage 0 failed.* = 7 is not",
            ),
        ):
            model.fit(wrong, np.ones((16, 3)), batch_size=16, verbose=0)
        self.assertGreater(run.call_count, 0)

    def test_side_effects_keep_their_order(self):
        seen = []

        class Note(keras.layers.Layer):
            def call(self, x):
                def note(value):
                    seen.append(float(value[0, 0]))
                    return value

                return tf.ensure_shape(
                    tf.numpy_function(note, [x], tf.float32), x.shape
                )

        strategy = tfscale.MeshStrategy(tfscale.device_mesh(pipeline=1))
        with strategy.scope():
            inputs = keras.Input((1,))
            outputs = keras.layers.Dense(1)(Note()(inputs))
            model = PipelineModel(keras.Model(inputs, outputs), 8)
            model.compile("sgd", "mse")
        x = np.arange(8.0)[:, None]
        with counted() as run:
            model.fit(x, x, batch_size=8, shuffle=False, verbose=0)
        self.assertEqual(run.call_count, 0)
        self.assertEqual(seen, list(range(8)))

    @parameterized.parameters((None,), (["accuracy"],))
    @pytest.mark.crossing
    def test_outputs_are_kept_if_metrics_read_them(self, metrics):
        # TensorFlow does not drop what a loop keeps and nothing reads.
        with counted() as run:
            same_numbers.on_mesh(job(build_dense, metrics=metrics), 2, 9)
        kept = {
            type(key)
            for call in run.call_args_list
            for _, key in call.args[1].made
            if any(a.kind == "B" for a in call.args[1].body.actions)
        }
        self.assertNotEmpty(kept)
        self.assertEqual(keys.Activation in kept, metrics is not None)

    def test_the_graph_does_not_grow_with_microbatches(self):
        written = []
        for microbatches in (9, 32):
            same_numbers.reset()
            strategy = tfscale.MeshStrategy(tfscale.device_mesh(pipeline=2))
            with strategy.scope():
                model = PipelineModel(
                    build_dense(), microbatches, balance=["c"]
                )
                model.compile("sgd", "mse")
            emit = Executor.emit_action
            with mock.patch.object(
                Executor, "emit_action", autospec=True, side_effect=emit
            ) as emitted:
                model.train_on_batch(np.ones((32, 6)), np.ones((32, 3)))
            written.append(emitted.call_count)
        self.assertEqual(written, [12, 12])
