"""A mean in a replica's loss that nobody divided is found in its gradients."""

import keras
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized
from keras import ops

from tfscale.whole_batch.undivided import has_undivided_mean

N = 4


def of_keras(x):
    """As a loss of Keras comes out on four replicas."""
    loss = keras.losses.MeanSquaredError()(ops.zeros_like(x), x)
    return ops.multiply(loss, ops.cast(1.0 / N, loss.dtype))


def mean(x):
    return ops.mean(ops.square(x))


def weighted_by_a_variable(x, divisor=1.0):
    weight = tf.raw_ops.ReadVariableOp(
        resource=tf.Variable(2.0).handle, dtype=tf.float32
    )
    return of_keras(x) + weight / divisor * mean(x)


def penalty(x, of):
    """On the gradient of a mean, which is no loss itself."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        inner = mean(x * x)
    return of_keras(x) + of(tape.gradient(inner, x))


LOSSES = (
    (True, lambda x: of_keras(x) + mean(x)),
    (True, lambda x: of_keras(x) - 0.5 * mean(x) + of_keras(ops.tanh(x))),
    (True, lambda x: of_keras(x) + ops.mean(ops.mean(x * x, axis=-1))),
    (True, weighted_by_a_variable),
    (True, lambda x: penalty(x, mean)),
    (True, lambda x: of_keras(x) * tf.ones(()) + mean(x - tf.ones_like(x))),
    (False, of_keras),
    (False, lambda x: of_keras(x) * tf.ones(()) + of_keras(x - tf.ones(()))),
    (False, lambda x: of_keras(x) + mean(x) / N),
    (False, lambda x: weighted_by_a_variable(x, N)),
    (False, lambda x: (N * of_keras(x) + mean(x)) / N),
    (False, lambda x: of_keras(x) + ops.mean(x * x / N)),
    (False, lambda x: of_keras(x) + ops.sum(ops.mean(x * x, axis=-1)) / 8),
    (
        False,
        lambda x: (
            of_keras(x)
            + ops.sum(ops.mean(x * x, -1))
            / ops.cast(N * ops.shape(x)[0], x.dtype)
        ),
    ),
    (False, lambda x: penalty(x, of_keras)),
    (False, lambda x: ops.exp(of_keras(x))),
)


class UndividedTest(parameterized.TestCase):
    @parameterized.parameters(*LOSSES)
    def test_is_found_beside_what_was_divided(self, expected, loss):
        with tf.Graph().as_default():
            weights = tf.compat.v1.placeholder(tf.float32, (5, 3))
            rows = tf.compat.v1.placeholder(tf.float32, (None, 5))
            with tf.GradientTape() as tape:
                tape.watch(weights)
                value = loss(rows @ weights)
            gradient = tape.gradient(value, weights)
            self.assertEqual(has_undivided_mean([None, gradient], N), expected)

    def test_is_looked_for_in_the_gradients_that_are_applied(self):
        with tf.Graph().as_default():
            good, bad = tf.ones((2, 3)), tf.ones((3, 3))
            with tf.GradientTape(persistent=True) as tape:
                tape.watch([good, bad])
                losses = of_keras(good), of_keras(bad) + mean(bad)
            gradients = [
                tape.gradient(loss, x) for loss, x in zip(losses, (good, bad))
            ]
            found = [has_undivided_mean([each], N) for each in gradients]
        self.assertEqual(found, [False, True])

    def test_of_eager_gradients_nothing_is_known(self):
        self.assertFalse(has_undivided_mean([tf.ones(())], N))


if __name__ == "__main__":
    absltest.main()
