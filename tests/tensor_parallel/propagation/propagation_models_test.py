"""Keras layers and keras_hub decoders stay sharded between their projections.

A model is traced twice: whole, and as a rank would trace it, where the output
of a column-split layer is a placeholder for its part. Fed with the parts of
the whole outputs, each rank has to come to the parts of the row-split layers'
whole inputs.
"""

import functools

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tfscale.tensor_parallel import retrace
from tfscale.tensor_parallel.propagation import propagation
from tfscale.tensor_parallel.propagation.layer_calls import LayerCall
from tfscale.tensor_parallel.propagation.layer_calls import Sink
from tfscale.tensor_parallel.propagation.layer_calls import Source
from tfscale.tensor_parallel.propagation.layer_calls import Trace

layers = keras.layers
BATCH, TIME, DIM, HEADS, HEAD_DIM, HIDDEN = 3, 5, 16, 4, 6, 24


class TracedModel:
    """A model in a graph of its own, in which projections record their calls.

    Args:
        make: Returns a model, its column-split layers with the sharded dim of
            their output, and its row-split ones with that of their input.
        inputs: Types and shapes of the model's inputs.
        given: For each call what it returns on a rank, as a type and a shape;
            None to run the layers.
        arguments: Passed to the model.
    """

    def __init__(self, made, inputs, given=None, **arguments):
        model, columns, rows = made
        self.graph, self.calls = tf.Graph(), []
        self._given = given
        with self.graph.as_default():
            self.inputs = [
                tf.compat.v1.placeholder(dtype, shape)
                for dtype, shape in inputs
            ]
            self.variables = [
                tf.compat.v1.placeholder(v.dtype, v.shape)
                for v in model.variables
            ]
            for layer, dim in columns.items():
                layer.call = functools.partial(self._column, layer, dim)
            for layer, dim in rows.items():
                layer.call = functools.partial(self._row, layer, dim)
            # It knows the whole size of its input.
            specs = {layer: layer.input_spec for layer in rows}
            for layer in rows:
                layer.input_spec = None
            pairs = zip(model.variables, self.variables)
            self.error, self.outputs = None, ()
            try:
                with keras.StatelessScope(pairs):
                    self.outputs = (model(*self.inputs, **arguments),)
            except (ValueError, tf.errors.InvalidArgumentError) as error:
                self.error = error
            finally:
                for layer in (*columns, *rows):
                    del layer.call
                for layer, spec in specs.items():
                    layer.input_spec = spec
        self.trace = Trace(self.graph, self.calls, self.outputs)

    def propagate(self, num_ranks):
        return propagation.propagate(
            self.trace,
            num_ranks=num_ranks,
            differentiable=[*self.inputs, *self.variables],
            retraced=True,
        )

    def given(self, sharded, num_ranks):
        """What a rank gets from each call if some sources stay sharded."""
        result = {}
        for call in self.calls:
            for tensor in call.outputs:
                result[call.key] = tensor.dtype, tensor.shape
            for source in call.sources:
                shape = source.tensor.shape.as_list()
                if call.key in sharded:
                    shape[source.dim] //= num_ranks
                result[call.key] = source.tensor.dtype, shape
        return result

    def _run(self, layer, x):
        start = len(self.graph.get_operations())
        key = layer.path, len(self.calls)
        if self._given is None:
            y = type(layer).call(layer, x)
        else:
            y = tf.compat.v1.placeholder(*self._given[key])
        return y, key, range(start, len(self.graph.get_operations()))

    def _column(self, layer, dim, x, training=None):
        y, *call = self._run(layer, x)
        self.calls.append(
            LayerCall(*call, sources=(Source(y, dim),), inputs=(x,))
        )
        return y

    def _row(self, layer, dim, x, training=None):
        y, *call = self._run(layer, x)
        self.calls.append(LayerCall(*call, sinks=(Sink(x, dim),), outputs=(y,)))
        return y


def attention(layer):
    """An attention layer and its projections, divided by heads."""
    build(layer, HIDDEN_STATES, HIDDEN_STATES)
    columns = [layer._query_dense, layer._key_dense, layer._value_dense]
    if getattr(layer, "use_gate", False):
        columns.append(layer._gate_dense)
    return layer, dict.fromkeys(columns, 2), {layer._output_dense: 2}


def build(layer, *inputs):
    layer(*[np.zeros([BATCH, *s[1:]], d) for d, s in inputs])
    return layer


HIDDEN_STATES = ("float32", (None, TIME, DIM))
ANY_LENGTH = ("float32", (None, None, DIM))


def multi_head(**kwargs):
    return attention(layers.MultiHeadAttention(HEADS, HEAD_DIM, **kwargs))


def grouped_query(**kwargs):
    return attention(layers.GroupQueryAttention(HEAD_DIM, HEADS, 2, **kwargs))


def _projections(layer):
    return {
        part.name: part
        for part in layer._flatten_layers()
        if isinstance(part, (layers.Dense, layers.EinsumDense))
    }


def by_name(layer, columns, rows):
    build(layer, HIDDEN_STATES)
    found = _projections(layer)
    return (
        layer,
        {found[name]: 2 for name in columns},
        {found[name]: 2 for name in rows},
    )


def transformer_decoder(**kwargs):
    return by_name(
        keras_hub.layers.TransformerDecoder(HIDDEN, HEADS, **kwargs),
        ("query", "key", "value", "feedforward_intermediate_dense"),
        ("attention_output", "feedforward_output_dense"),
    )


def gpt2():
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=10,
        num_layers=1,
        num_heads=HEADS,
        hidden_dim=DIM,
        intermediate_dim=HIDDEN,
        max_sequence_length=TIME,
    )
    return by_name(
        backbone.transformer_layers[0],
        ("query", "key", "value", "feedforward_intermediate_dense"),
        ("attention_output", "feedforward_output_dense"),
    )


def _decoder(backbone_class, columns, rows, **kwargs):
    backbone = backbone_class(
        vocabulary_size=10,
        num_layers=1,
        num_query_heads=HEADS,
        num_key_value_heads=2,
        hidden_dim=DIM,
        intermediate_dim=HIDDEN,
        **kwargs,
    )
    layer = backbone.transformer_layers[0]
    return by_name(
        layer,
        ("query", "key", "value", *columns),
        ("attention_output", *rows),
    )


def llama(**kwargs):
    return _decoder(
        keras_hub.models.LlamaBackbone,
        ("feedforward_intermediate_dense", "feedforward_gate_dense"),
        ("feedforward_output_dense",),
        **kwargs,
    )


def gemma():
    return _decoder(
        keras_hub.models.GemmaBackbone,
        ("ffw_gating", "ffw_gating_2"),
        ("ffw_linear",),
        head_dim=HEAD_DIM,
    )


TRAINING = {"training": True}
CAUSAL = {"use_causal_mask": True}
# name, model, arguments of its call.
MODELS = (
    ("multi_head", multi_head, {}),
    ("multi_head_causal", multi_head, CAUSAL),
    ("multi_head_scores", lambda: multi_head(dropout=1e-9), CAUSAL),
    ("grouped_query", grouped_query, CAUSAL),
    ("grouped_query_scores", lambda: grouped_query(dropout=1e-9), CAUSAL),
    ("grouped_query_gate", lambda: grouped_query(use_gate=True), {}),
    ("decoder", transformer_decoder, {}),
    ("decoder_gelu", lambda: transformer_decoder(activation="gelu"), {}),
    ("gpt2", gpt2, {}),
    ("llama", llama, {}),
    ("llama_rope", lambda: llama(rope_scaling_factor=2.0), {}),
)
WITH_DROPOUT = (
    ("multi_head", lambda: multi_head(dropout=0.1), CAUSAL | TRAINING),
    ("grouped_query", lambda: grouped_query(dropout=0.1), TRAINING),
    ("decoder", lambda: transformer_decoder(dropout=0.1), TRAINING),
    ("gpt2", gpt2, TRAINING),
    ("llama", lambda: llama(dropout=0.1), TRAINING),
)


class Between(layers.Layer):
    """Something between a column-split and a row-split layer."""

    def __init__(self, function):
        super().__init__()
        self.up = layers.Dense(HIDDEN)
        self.down = layers.Dense(DIM)
        self.function = function

    def call(self, x):
        return self.down(self.function(self.up(x)))


def between(function):
    layer = build(Between(function), HIDDEN_STATES)
    return layer, {layer.up: 2}, {layer.down: 2}


def heads_of_a_layer(x):
    x = keras.ops.reshape(x, (-1, TIME, HEADS, HIDDEN // HEADS))
    return keras.ops.reshape(x, (-1, TIME, HIDDEN))


def heads_of_the_tensor(x):
    heads = x.shape[-1] // 6
    x = keras.ops.reshape(x, (-1, TIME, heads, 6))
    return keras.ops.reshape(x, (-1, TIME, heads * 6))


@tf.custom_gradient
def gradient_by_size(x):
    return tf.identity(x), lambda dy: dy / float(x.shape[-1])


# name, operation, a word of the reason.
NOT_THE_SAME = (
    ("number", lambda x: x / np.float32(np.sqrt(x.shape[-1])), "another value"),
    ("integer", lambda x: x // x.shape[-1], "another value"),
    ("way", lambda x: -x if x.shape[-1] > HIDDEN // 2 else tf.exp(x), "is Exp"),
    (
        "other_tensor",
        lambda x: (tf.exp(x), tf.sin(x))[x.shape[-1] < HIDDEN],
        "stands for",
    ),
    ("more", lambda x: x + 1 if x.shape[-1] == HIDDEN else x, "operations"),
    ("gradient", gradient_by_size, "another value"),
    ("attribute", lambda x: tf.nn.leaky_relu(x, 1 / x.shape[-1]), "attributes"),
    ("layers_size", heads_of_a_layer, "shape"),
    (
        "fails",
        lambda x: x.set_shape((None, None, HIDDEN)) or x,
        "fails before layer",
    ),
)


def inputs_of(model, shape):
    attention_layers = (layers.MultiHeadAttention, layers.GroupQueryAttention)
    return [shape] * (2 if isinstance(model, attention_layers) else 1)


def decide(made, inputs, num_ranks=2, **arguments):
    """Traces, decides, traces again as a rank would, and compares."""
    whole = TracedModel(made, inputs, **arguments)
    found = whole.propagate(num_ranks)
    local = TracedModel(
        made, inputs, whole.given(found.sharded, num_ranks), **arguments
    )
    different = retrace.differing_sources(
        whole.trace, local.trace, found, num_ranks=num_ranks
    )
    return whole, found, local, different


class ModelsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.named_parameters(
        (f"{name}_{length}_{num_ranks}", make, shape, num_ranks, arguments)
        for length, shape in (("fixed", HIDDEN_STATES), ("any", ANY_LENGTH))
        for name, make, arguments in MODELS
        for num_ranks in (2, 4)
        # Of two heads for keys and values no four ranks have one each.
        if num_ranks == 2 or make in (multi_head, transformer_decoder, gpt2)
    )
    @pytest.mark.crossing(every=10)
    def test_parts_arrive_at_the_row_split_layers(
        self, make, shape, num_ranks, arguments
    ):
        made = make()
        whole, found, local, different = decide(
            made, inputs_of(made[0], shape), num_ranks, **arguments
        )
        self._assert_all_sharded(whole, found, local, different)
        feed = {
            tensor: np.random.default_rng(place).normal(size=(BATCH, TIME, DIM))
            for place, tensor in enumerate(whole.inputs)
        }
        for tensor, variable in zip(whole.variables, made[0].variables):
            noise = np.random.default_rng(7).normal(size=variable.shape)
            value = keras.ops.convert_to_numpy(variable)
            feed[tensor] = value + (0.1 * noise).astype(value.dtype)
        values = self._run(whole, feed, "sources", "sinks", "outputs")
        for rank in range(num_ranks):
            own = whole.inputs + whole.variables
            names = local.inputs + local.variables
            fed = {name: feed[tensor] for name, tensor in zip(names, own)}
            for call in local.calls:
                for source in call.sources:
                    fed[source.tensor] = np.split(
                        values[call.key]["sources"][0], num_ranks, source.dim
                    )[rank]
                for tensor in call.outputs:
                    fed[tensor] = values[call.key]["outputs"][0]
            parts = self._run(local, fed, "sinks")
            for call in local.calls:
                for sink in call.sinks:
                    expected = values[call.key]["sinks"][0]
                    self.assertAllClose(
                        parts[call.key]["sinks"][0],
                        np.split(expected, num_ranks, sink.dim)[rank],
                        1e-6,
                        1e-6,
                    )

    def _run(self, traced, feed, *names):
        tensors = {
            call.key: {
                name: [getattr(p, "tensor", p) for p in getattr(call, name)]
                for name in names
            }
            for call in traced.calls
        }
        with tf.compat.v1.Session(graph=traced.graph) as session:
            return session.run(tensors, feed)

    def _assert_all_sharded(self, whole, found, local, different):
        self.assertEqual(found.gathered, {})
        self.assertEqual(
            found.sink_sharded, {call.key for call in whole.calls if call.sinks}
        )
        self.assertIsNone(local.error)
        self.assertEqual(different, {})

    @parameterized.named_parameters(
        (f"{name}_{length}", make, shape, arguments)
        for length, shape in (("fixed", HIDDEN_STATES), ("any", ANY_LENGTH))
        for name, make, arguments in WITH_DROPOUT
    )
    @pytest.mark.crossing(every=5)
    def test_dropout_leaves_parts_sharded(self, make, shape, arguments):
        made = make()
        self._assert_all_sharded(
            *decide(made, inputs_of(made[0], shape), **arguments)
        )

    def test_a_projection_that_is_not_split_gathers_the_others(self):
        layer, columns, rows = grouped_query(use_gate=True)
        del columns[layer._gate_dense]
        _, found, *_ = decide((layer, columns, rows), [HIDDEN_STATES] * 2)
        self.assertEmpty(found.sharded)
        self.assertEmpty(found.sink_sharded)
        self.assertIn("is whole", " ".join(found.gathered.values()))

    def test_a_decoder_that_knows_its_own_number_of_heads(self):
        # Gemma reshapes queries to heads that it has from its config.
        made = gemma()
        _, found, _, different = decide(made, [HIDDEN_STATES])
        self.assertLen(found.sharded, 5)
        names = {path.rpartition("/")[-1] for path, _ in different}
        self.assertEqual(names, {"query", "key", "value"})
        columns = made[1]
        for column in list(columns):
            if column.name in names:
                del columns[column]
        _, found, _, different = decide(made, [HIDDEN_STATES])
        self.assertLen(found.sharded, 2)
        self.assertLen(found.sink_sharded, 1)
        self.assertEmpty(different)


class RetraceTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.named_parameters(*NOT_THE_SAME)
    def test_python_that_reads_sizes_is_found_out(self, function, reason):
        _, found, _, different = decide(between(function), [HIDDEN_STATES])
        self.assertLen(found.sharded, 1)
        self.assertEqual(set(different), set(found.sharded))
        self.assertIn(reason, "".join(different.values()))

    def test_a_failure_says_nothing_of_the_layers_behind_it(self):
        def fails(x):
            x.set_shape((None, None, HIDDEN))
            return x

        first, up, down = between(fails)
        second, *behind = between(tf.nn.relu)
        model = build(keras.Sequential([first, second]), HIDDEN_STATES)
        made = model, up | behind[0], down | behind[1]
        _, found, local, different = decide(made, [HIDDEN_STATES])
        self.assertIsNotNone(local.error)
        self.assertLen(found.sharded, 2)
        self.assertEqual([path for path, _ in different], [first.up.path])
        self.assertIn("fails before", "".join(different.values()))

    def test_sizes_of_the_tensor_in_shapes_are_right(self):
        made = between(heads_of_the_tensor)
        _, found, _, different = decide(made, [HIDDEN_STATES])
        self.assertLen(found.sink_sharded, 1)
        self.assertEmpty(different)

    def test_traces_that_differ_by_themselves(self):
        calls = []

        def function(x):
            calls.append(x)
            return tf.exp(x) if len(calls) == 3 else -x

        layer = layers.Lambda(function)
        model = keras.Sequential([layer, layers.Dense(DIM)])
        build(model, HIDDEN_STATES)
        with self.assertRaisesRegex(ValueError, "the same way each time"):
            decide((model, {}, {}), [HIDDEN_STATES])


if __name__ == "__main__":
    tf.test.main()
