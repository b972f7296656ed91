"""Random numbers of optimizers, and of who names no seed generator.

The noise of an optimizer was another one on each replica, and their weights
drifted apart. `keras.random` without a seed failed in a thread of a replica,
which has no global seed generator.
"""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers

X = np.ones((8, 2), "float32")


class Noisy(keras.optimizers.SGD):
    """Adds noise to gradients, which a function draws."""

    def __init__(self, make_draw, **kwargs):
        super().__init__(0.1, **kwargs)
        self.draw = make_draw(self)

    def update_step(self, gradient, variable, learning_rate):
        noise = self.draw(variable.shape)
        super().update_step(gradient + noise, variable, learning_rate)


def by_seeds(optimizer):
    optimizer.seeds = keras.random.SeedGenerator(1)
    return lambda shape: keras.random.normal(shape, seed=optimizer.seeds)


def by_generator(optimizer):
    optimizer.generator = tf.random.Generator.from_seed(1)
    return optimizer.generator.normal


def by_branch(optimizer):
    def draw(shape):
        return tf.cond(
            optimizer.iterations < 1,
            lambda: tf.random.normal(shape),
            lambda: tf.zeros(shape),
        )

    return draw


class Drawing(keras.layers.Layer):
    """Notes what it draws without a seed, row by row."""

    def build(self, input_shape):
        self.drawn = self.add_weight(
            shape=(), initializer="zeros", trainable=False
        )

    def call(self, x):
        draw = keras.random.uniform(())
        self.drawn.assign(draw)
        return x + draw


def of_each_device(variable):
    return [float(part) for part in variable.value.values]


class DrawsTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        same_numbers.reset()

    def trained(self, make_draw=None, layers=(), axes=None):
        strategy = tf.distribute.get_strategy()
        if axes:
            mesh = tfscale.device_mesh(**axes)
            layout_map = keras.distribution.LayoutMap(mesh)
            layout_map[".*wide/kernel"] = (None, "model")
            strategy = tfscale.MeshStrategy(
                mesh, layout_map if "model" in axes else None
            )
        keras.utils.set_random_seed(1)
        with strategy.scope():
            layers = [layer() for layer in layers]
            if axes and "model" in axes:
                layers.append(keras.layers.Dense(2, name="wide"))
            model = keras.Sequential(
                [keras.Input((2,)), *layers, keras.layers.Dense(1)]
            )
            if axes and "pipeline" in axes:
                model = tfscale.PipelineModel(model, num_microbatches=2)
            optimizer = Noisy(make_draw) if make_draw else "sgd"
            model.compile(optimizer, "mse")
        model.fit(X, X[:, :1], batch_size=4, verbose=0)
        return model

    def test_the_noise_of_an_optimizer_is_that_of_one_device(self):
        expected = self.trained(by_seeds).layers[-1].kernel.numpy()
        same_numbers.reset()
        kernel = self.trained(by_seeds, axes={"data": 2}).layers[-1].kernel
        for part in kernel.value.values:
            self.assertAllClose(part, expected, rtol=1e-5)

    @parameterized.parameters(
        ("RandomStandardNormal", lambda optimizer: tf.random.normal),
        ("RngReadAndSkip", by_generator),
        ("RandomStandardNormal", by_branch),
    )
    def test_an_optimizer_that_draws_apart_is_refused(self, op, make_draw):
        with self.assertRaisesRegex(
            ValueError, f"same numbers.*Noisy, .*{op}.*SeedGenerator"
        ):
            self.trained(make_draw, axes={"data": 2})

    def test_one_replica_may_draw_as_it_likes(self):
        self.trained(lambda optimizer: tf.random.normal, axes={"data": 1})

    def test_replicas_draw_apart_without_a_seed(self):
        model = self.trained(layers=[Drawing], axes={"data": 2})
        first, second = of_each_device(model.layers[0].drawn)
        self.assertNotEqual(first, second)
        drawn = {first, second}
        model.fit(X, X[:, :1], batch_size=4, verbose=0)
        self.assertNoCommonElements(
            drawn, of_each_device(model.layers[0].drawn)
        )

    def test_what_nobody_can_draw_from_is_said(self):
        # No layer has drawn before the step: there is no generator.
        with self.assertRaisesRegex(
            ValueError, "without a `seed`, by 'noisy.*SeedGenerator"
        ):
            self.trained(
                lambda optimizer: keras.random.normal, axes={"data": 2}
            )

    @parameterized.parameters("pipeline", "model")
    def test_stages_and_ranks_without_a_seed_are_said(self, axis):
        with self.assertRaisesRegex(
            ValueError, "without a `seed`, by 'drawing.*SeedGenerator"
        ):
            self.trained(
                layers=[Drawing, lambda: keras.layers.Dense(2)],
                axes={axis: 2},
            )


if __name__ == "__main__":
    tf.test.main()
