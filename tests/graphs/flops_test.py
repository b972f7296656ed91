"""FLOPs against numbers counted by hand."""

import keras
import pytest
import tensorflow as tf
from absl.testing import parameterized

from examples import gpt
from tfscale.graphs import flops
from tfscale.pipeline.stages import traced_call
from tfscale.planner.traced import trace_table

layers = keras.layers
# Sizes that are all different, so that no mix-up of dims gives a right sum.
BATCH, TIME, DIM = 1, 5, 6


def operation_flops(operation, *args, **kwargs):
    traced = traced_call.trace_call(operation, args, kwargs)
    return flops.function_flops(traced)


def tensor(*shape, dtype="float32"):
    return keras.KerasTensor((None, *shape), dtype)


class MyMixer(layers.Layer):
    """A user's layer that no table could know."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[1], 7))

    def call(self, x):
        return keras.ops.einsum("btd,tu->bud", x, self.kernel)


class Scale(layers.Layer):
    """Nearly no work, with a weight, so that what follows has a gradient."""

    def build(self, shape):
        self.scale = self.add_weight(initializer="ones")

    def call(self, x):
        return x * self.scale


class Calls(layers.Layer):
    """A function in a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


class Choice(layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 3))
        self.small = self.add_weight(shape=(shape[-1], 1))

    def call(self, x):
        return keras.ops.cond(
            keras.ops.sum(x) > 0,
            lambda: keras.ops.matmul(x, self.kernel),
            lambda: keras.ops.matmul(x, self.small) + keras.ops.zeros((3,)),
        )


class AddsLoss(layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.sum(x))
        return x


def functional():
    x = keras.Input((DIM,))
    h = layers.Dense(4)(x)
    return keras.Model(x, layers.Dense(3)(h) + layers.Dense(3)(x))


# name, layer, shape of the input, multiply-adds, elements of the output.
LAYERS = (
    ("dense", lambda: layers.Dense(4), (DIM,), 6 * 4, 4),
    ("dense_time", lambda: layers.Dense(4), (TIME, DIM), 5 * 6 * 4, 5 * 4),
    (
        "einsum_dense",
        lambda: layers.EinsumDense("abc,cde->abde", (None, 2, 3)),
        (TIME, DIM),
        5 * 6 * 2 * 3,
        5 * 2 * 3,
    ),
    (
        "einsum_dense_ellipsis",
        lambda: layers.EinsumDense("...x,xy->...y", 4),
        (TIME, DIM),
        5 * 6 * 4,
        5 * 4,
    ),
    ("conv1d", lambda: layers.Conv1D(4, 3), (10, 6), 8 * 4 * 3 * 6, 8 * 4),
    (
        "conv1d_groups",
        lambda: layers.Conv1D(4, 3, groups=2),
        (10, 6),
        8 * 4 * 3 * 3,
        8 * 4,
    ),
    (
        "conv1d_dilated_causal",
        lambda: layers.Conv1D(4, 3, padding="causal", dilation_rate=2),
        (10, 6),
        10 * 4 * 3 * 6,
        10 * 4,
    ),
    (
        "conv2d",
        lambda: layers.Conv2D(4, (3, 2), strides=2, padding="same"),
        (9, 8, 6),
        5 * 4 * 4 * 3 * 2 * 6,
        5 * 4 * 4,
    ),
    (
        "conv2d_groups",
        lambda: layers.Conv2D(4, 3, groups=2),
        (9, 8, 6),
        7 * 6 * 4 * 9 * 3,
        7 * 6 * 4,
    ),
    (
        "conv3d",
        lambda: layers.Conv3D(4, 3),
        (9, 8, 7, 6),
        7 * 6 * 5 * 4 * 27 * 6,
        7 * 6 * 5 * 4,
    ),
    (
        "conv1d_transpose",
        lambda: layers.Conv1DTranspose(4, 3, strides=2),
        (10, 6),
        10 * 6 * 3 * 4,
        21 * 4,
    ),
    (
        "conv2d_transpose",
        lambda: layers.Conv2DTranspose(4, 3, strides=2),
        (9, 8, 6),
        9 * 8 * 6 * 9 * 4,
        19 * 17 * 4,
    ),
    (
        "conv3d_transpose",
        lambda: layers.Conv3DTranspose(4, 3),
        (5, 4, 3, 6),
        5 * 4 * 3 * 6 * 27 * 4,
        7 * 6 * 5 * 4,
    ),
    (
        "depthwise_conv1d",
        lambda: layers.DepthwiseConv1D(3, depth_multiplier=2),
        (10, 6),
        8 * 12 * 3,
        8 * 12,
    ),
    (
        "depthwise_conv2d",
        lambda: layers.DepthwiseConv2D(3, depth_multiplier=2),
        (9, 8, 6),
        7 * 6 * 12 * 9,
        7 * 6 * 12,
    ),
    (
        "separable_conv2d",
        lambda: layers.SeparableConv2D(4, 3),
        (9, 8, 6),
        7 * 6 * 6 * 9 + 7 * 6 * 6 * 4,
        7 * 6 * 4,
    ),
    (
        "simple_rnn",
        lambda: layers.SimpleRNN(4),
        (TIME, DIM),
        5 * (6 * 4 + 4 * 4),
        4,
    ),
    (
        "lstm",
        lambda: layers.LSTM(4),
        (TIME, DIM),
        5 * 4 * (6 * 4 + 4 * 4),
        4,
    ),
    (
        "gru_sequences",
        lambda: layers.GRU(4, return_sequences=True),
        (TIME, DIM),
        5 * 3 * (6 * 4 + 4 * 4),
        5 * 4,
    ),
    (
        "rnn_unrolled",
        lambda: layers.LSTM(4, unroll=True),
        (TIME, DIM),
        5 * 4 * (6 * 4 + 4 * 4),
        4,
    ),
    (
        "rnn_stacked_cells",
        lambda: layers.RNN([layers.LSTMCell(4), layers.GRUCell(3)]),
        (TIME, DIM),
        5 * (4 * (6 * 4 + 4 * 4) + 3 * (4 * 3 + 3 * 3)),
        3,
    ),
    (
        "bidirectional",
        lambda: layers.Bidirectional(layers.LSTM(4)),
        (TIME, DIM),
        2 * 5 * 4 * (6 * 4 + 4 * 4),
        8,
    ),
    (
        "time_distributed",
        lambda: layers.TimeDistributed(layers.Dense(4)),
        (TIME, DIM),
        5 * 6 * 4,
        5 * 4,
    ),
    (
        "conv_lstm",
        lambda: layers.ConvLSTM2D(4, 3, padding="same"),
        (TIME, 8, 7, 6),
        5 * 8 * 7 * 9 * 4 * (6 * 4 + 4 * 4),
        8 * 7 * 4,
    ),
    ("layer_norm", layers.LayerNormalization, (TIME, DIM), 0, 5 * 6),
    ("batch_norm", layers.BatchNormalization, (TIME, DIM), 0, 5 * 6),
    ("gelu", lambda: layers.Activation("gelu"), (TIME, DIM), 0, 5 * 6),
    ("dropout", lambda: layers.Dropout(0.5), (TIME, DIM), 0, 5 * 6),
    ("embedding", lambda: layers.Embedding(10, 4), (TIME,), 0, 5 * 4),
    (
        "sequential",
        lambda: keras.Sequential([layers.Dense(4), layers.LSTM(3)]),
        (TIME, DIM),
        5 * 6 * 4 + 5 * 4 * (4 * 3 + 3 * 3),
        3,
    ),
    ("functional", functional, (DIM,), 6 * 4 + 4 * 3 + 6 * 3, 3),
    ("users_layer", MyMixer, (TIME, DIM), 5 * 6 * 7, 7 * 6),
    ("dearest_branch", Choice, (TIME, DIM), 5 * 6 * 3, 5 * 3),
)


# name, layer, shape of its input, and how many times a forward training takes
# without the gradient of the input.
TRAINED = (
    ("dense", lambda: layers.Dense(64), (32,), 2),
    (
        "einsum",
        lambda: layers.EinsumDense("abc,cde->abde", (None, 8, 9)),
        (64, 48),
        2,
    ),
    ("conv2d", lambda: layers.Conv2D(16, (3, 2), strides=2), (17, 16, 24), 2),
    # One function computes both gradients.
    ("conv2d_groups", lambda: layers.Conv2D(16, 3, groups=2), (17, 16, 24), 3),
    ("conv3d", lambda: layers.Conv3D(16, 3), (9, 8, 7, 24), 2),
    ("transposed", lambda: layers.Conv2DTranspose(16, 3), (9, 8, 24), 2),
    ("depthwise", lambda: layers.DepthwiseConv2D(3), (17, 16, 24), 2),
    # Gradients go back through the states.
    ("gru_unrolled", lambda: layers.GRU(48, unroll=True), (13, 48), 2.5),
    ("attention", lambda: SelfAttention(4, 32), (24, 64), 2.25),
)


class SelfAttention(layers.Layer):
    def __init__(self, *args):
        super().__init__()
        self.attention = layers.MultiHeadAttention(*args)

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x):
        return self.attention(x, x)


class FlopsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.named_parameters(*LAYERS)
    def test_counts_what_a_layer_multiplies(self, make, shape, macs, elements):
        self.assertEqual(
            operation_flops(make(), tensor(*shape)), 2 * macs + elements
        )

    def test_attention_counts_projections_scores_and_sum(self):
        # Two heads of 3 for queries and keys, of 4 for values.
        layer = layers.MultiHeadAttention(2, 3, value_dim=4)
        query, value = tensor(5, 6), tensor(7, 8)
        projections = 2 * (5 * 6 * 3 + 7 * 8 * 3 + 7 * 8 * 4 + 5 * 4 * 6)
        attention = 2 * (5 * 7 * 3 + 5 * 7 * 4)
        self.assertEqual(
            operation_flops(layer, query, value),
            2 * (projections + attention) + 5 * 6,
        )

    def test_causal_mask_leaves_the_count_of_attention(self):
        layer = layers.MultiHeadAttention(2, 3)
        x = tensor(5, 6)
        self.assertEqual(
            operation_flops(layer, x, x, use_causal_mask=True),
            operation_flops(layer, x, x),
        )

    def test_grouped_query_attention_shares_keys_and_values(self):
        # Four query heads, two heads of keys and values, of 3 each.
        layer = layers.GroupQueryAttention(3, 4, 2)
        projections = 5 * 6 * 3 * (4 + 2 + 2) + 5 * 4 * 3 * 6
        attention = 4 * 2 * 5 * 5 * 3
        self.assertEqual(
            operation_flops(layer, tensor(5, 6), tensor(5, 6)),
            2 * (projections + attention) + 5 * 6,
        )

    @parameterized.named_parameters(
        ("matmul", lambda x, y: keras.ops.matmul(x, y)),
        ("einsum", lambda x, y: keras.ops.einsum("bij,bjk->bik", x, y)),
        ("dot", lambda x, y: layers.Dot(axes=(2, 1))([x, y])),
    )
    def test_counts_operations_of_a_functional_graph(self, function):
        x, y = keras.Input((5, 6)), keras.Input((6, 7))
        model = keras.Model([x, y], function(x, y))
        self.assertEqual(operation_flops(model, [x, y]), 2 * 5 * 6 * 7 + 5 * 7)

    def test_ellipses_of_an_einsum_are_broadcast(self):
        def call(x):
            return tf.einsum("...ij,...jk->...ik", x, tf.ones((2, 1, 6, 7)))

        layer = layers.Lambda(call, output_shape=(2, 3, 5, 7))
        self.assertEqual(
            operation_flops(layer, tensor(3, 5, 6)),
            2 * 2 * 3 * 5 * 6 * 7 + 2 * 3 * 5 * 7,
        )

    def test_an_einsum_of_one_tensor_multiplies_nothing(self):
        layer = layers.Lambda(lambda x: tf.einsum("bij->bji", x))
        self.assertEqual(operation_flops(layer, tensor(5, 6)), 5 * 6)

    @parameterized.named_parameters(
        ("matrix", lambda x: tf.matmul(x[0], tf.ones((5, 7)), True)),
        ("batch", lambda x: tf.matmul(x, tf.ones((1, 5, 7)), True)),
    )
    def test_a_transposed_matrix_is_contracted_by_its_rows(self, call):
        self.assertEqual(
            operation_flops(layers.Lambda(call), tensor(5, 6)),
            2 * 6 * 5 * 7 + 6 * 7,
        )

    def test_tensordot_is_counted(self):
        x = keras.Input((5, 6))
        model = keras.Model(
            x, keras.ops.tensordot(x, keras.ops.ones((6, 7)), 1)
        )
        self.assertEqual(operation_flops(model, x), 2 * 5 * 6 * 7 + 5 * 7)

    def test_unknown_length_counts_as_one(self):
        layer = layers.LSTM(4)
        self.assertEqual(
            operation_flops(layer, tensor(None, 6)),
            operation_flops(layer, tensor(1, 6)),
        )

    def test_a_batch_size_counts_where_it_is_given(self):
        x = keras.KerasTensor((3, 6))
        self.assertEqual(
            operation_flops(layers.Dense(4), x), 3 * (2 * 6 * 4 + 4)
        )

    def test_cudnn_kernels_count_as_the_layer_they_stand_for(self):
        # What a GPU runs for LSTM(4) on (5, 6); buildable without one.
        size = 4 * (6 * 4 + 4 * 4) + 8 * 4

        def call(x):
            return tf.raw_ops.CudnnRNNV3(
                input=tf.transpose(x, [1, 0, 2]),
                input_h=tf.zeros((1, 1, 4)),
                input_c=tf.zeros((1, 1, 4)),
                params=tf.zeros((size,)),
                sequence_lengths=[5],
                rnn_mode="lstm",
                is_training=True,
            ).output[-1]

        self.assertEqual(
            operation_flops(
                layers.Lambda(call, output_shape=(4,)), tensor(5, 6)
            ),
            2 * 5 * 4 * (6 * 4 + 4 * 4) + 4,
        )

    @parameterized.named_parameters(*TRAINED)
    @pytest.mark.crossing(every=4)
    def test_a_backward_takes_twice_a_forward(self, make, shape, times):
        # That of the first layer alone, which has nothing before it, is less.
        layer = make()
        model = keras.Sequential([keras.Input(shape), Scale(), layer])
        forward = operation_flops(layer, tensor(*shape))
        spec = tf.TensorSpec((None, *shape), "float32")
        both = flops.training_flops(model, spec)
        self.assertAllClose(both, 3 * forward, rtol=0.06)
        model.layers[0].trainable = False
        self.assertAllClose(
            flops.training_flops(model, spec), times * forward, rtol=0.06
        )
        layer.trainable = False
        self.assertAllClose(
            flops.training_flops(model, spec), forward, rtol=0.06
        )

    @parameterized.parameters("LSTM", "GRU", "SimpleRNN")
    @pytest.mark.crossing(every=3)
    def test_the_gradient_of_a_loop_is_that_of_its_steps(self, name):
        # It was refused: the second output of an operation was taken for the
        # first, which has no shape.
        arguments = {} if name == "SimpleRNN" else {"use_cudnn": False}
        spec = tf.TensorSpec((None, 13, 8), "float32")
        counted = []
        for unroll in (True, False):
            layer = getattr(layers, name)(16, unroll=unroll, **arguments)
            model = keras.Sequential([keras.Input((13, 8)), layer])
            counted.append(flops.training_flops(model, spec))
        # The loop also has a gradient of the first step's state.
        self.assertAllClose(*counted, rtol=0.03)

    @parameterized.parameters("gpt", "cnn")
    @pytest.mark.crossing(every=2)
    def test_training_is_counted_as_the_planner_does(self, kind):
        def build():
            if kind == "gpt":
                return gpt.build_gpt(2, 256, 4, 64, 0.1)
            x = h = keras.Input((32, 32, 3))
            for filters in (32, 48, 64):
                h = layers.Conv2D(filters, 3, padding="same")(h)
                h = layers.ReLU()(layers.BatchNormalization()(h))
            h = layers.GlobalAveragePooling2D()(h)
            return keras.Model(x, layers.Dense(10)(h))

        model = build()
        (spec,) = (tf.TensorSpec(x.shape, x.dtype) for x in model.inputs)
        table = trace_table(build, [1])
        planned = sum(
            layer.forward.flops + layer.backward.flops
            for layer in table.by_ranks[1]
        )
        found = flops.training_flops(model, spec)
        self.assertAllClose(found, planned, rtol=0.02)

    def test_outputs_of_operations_in_functions_have_names(self):
        # The second output of an operation was taken for its first.
        @tf.function(autograph=False)
        def mixed(x):
            sizes, mixer, _ = tf.linalg.svd(x, full_matrices=True)
            first, _, last = tf.split(x, 3, axis=1)
            del sizes
            return tf.matmul(mixer, x), tf.matmul(first, last, transpose_b=True)

        found = operation_flops(Calls(mixed), tensor(6, 4))
        self.assertEqual(found, 2 * (6 * 6 * 4 + 2 * 4 * 2) + 6 * 4 + 2 * 2)

    def test_counting_leaves_no_trace_in_the_layer(self):
        layer = AddsLoss()
        norm = layers.BatchNormalization()
        operation_flops(layer, tensor(DIM))
        operation_flops(norm, tensor(DIM), training=True)
        self.assertEmpty(layer.losses)
        self.assertAllEqual(norm.moving_mean, [0.0] * DIM)


if __name__ == "__main__":
    tf.test.main()
