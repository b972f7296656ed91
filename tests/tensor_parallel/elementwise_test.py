import functools

import keras
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tfscale.tensor_parallel import analysis
from tfscale.tensor_parallel import elementwise
from tfscale.tensor_parallel.rules import rules

OPS = keras.ops


@functools.cache
def factor():
    with tf.init_scope():
        return tf.Variable(2.0)


def scaled_by_size(x):
    return x / x.shape[-1]


@tf.custom_gradient
def with_mean_gradient(x):
    return tf.identity(x), lambda dy: dy - tf.reduce_mean(dy, -1, True)


class ElementwiseTest(parameterized.TestCase):
    def test_activations_of_keras(self):
        whole = {"glu", "log_softmax", "softmax", "sparsemax"}
        names = set(dir(keras.activations))
        # The last one takes more than a tensor.
        names -= {"deserialize", "get", "serialize", "threshold"}
        for name in sorted(name for name in names if name.islower()):
            activation = getattr(keras.activations, name)
            if callable(activation):
                self.assertEqual(
                    elementwise.acts_on_elements(activation),
                    name not in whole,
                    name,
                )

    @parameterized.named_parameters(
        ("none", None, True),
        ("nothing", lambda x: x, True),
        # Those of BERT and GPT-2 in keras_hub, once taken for anything.
        ("approximate", lambda x: OPS.gelu(x, approximate=True), True),
        ("quick", lambda x: x * OPS.sigmoid(1.702 * x), True),
        (
            "partial",
            functools.partial(keras.activations.leaky_relu, negative_slope=0.3),
            True,
        ),
        ("branches", lambda x: OPS.where(x > 0, x, 0.0), True),
        ("of_tensorflow", tf.nn.silu, True),
        ("layer", keras.layers.LeakyReLU(0.1), True),
        ("layer_with_weights", keras.layers.PReLU(), False),
        ("layer_over_units", keras.layers.Softmax(), False),
        ("gradient_of_all", with_mean_gradient, False),
        ("branch_by_size", lambda x: x if x.shape[-1] > 4 else -x, False),
        ("mean", lambda x: x - OPS.mean(x), False),
        ("order", lambda x: OPS.sort(x), False),
        ("neighbors", lambda x: OPS.roll(x, 1, -1), False),
        ("positions", lambda x: OPS.roll(x, 1, 1), False),
        ("length", lambda x: OPS.normalize(x), False),
        ("size", scaled_by_size, False),
        ("size_as_tensor", lambda x: x / OPS.cast(tf.shape(x)[-1], "float32"),
         False),
        ("weights", lambda x: x * tf.constant([1.0] * 6), False),
        ("variable", lambda x: factor() * x, False),
        ("draws", lambda x: tf.nn.dropout(x, 0.5), False),
        ("fails", lambda x: x.no_such_attribute, False),
    )  # fmt: skip
    def test_any_other(self, activation, expected):
        self.assertEqual(elementwise.acts_on_elements(activation), expected)


class _Rule(rules.Rule):
    def __init__(self, name, source_dim, sink_dim):
        self.source_dim, self.sink_dim = source_dim, sink_dim
        super().__init__(keras.layers.Dense(1, name=name))

    def run(self, inputs):
        raise NotImplementedError


class SwappedTest(absltest.TestCase):
    def test_a_pair_that_is_put_together_in_between_is_not_swapped(self):
        # Columns, rows, columns, rows, as is right; only what lies between
        # cannot work on parts. The second and third were said to be swapped.
        calls = [
            (_Rule("up", -1, None), False),
            (_Rule("down", None, -1), False),
            (_Rule("up_again", -1, None), False),
            (_Rule("down_again", None, -1), False),
        ]
        (up, _), _, (again, _), _ = calls
        reasons = {up: "Sort needs all", again: "Sort needs all"}
        self.assertNotIn("swapped", analysis.missing_partners(calls, reasons))
        swapped = analysis.missing_partners(
            calls[1:], {again: "Sort needs all"}
        )
        self.assertIn("'down' is sharded along its inputs", swapped)
        self.assertIn("they are swapped", swapped)


if __name__ == "__main__":
    absltest.main()
