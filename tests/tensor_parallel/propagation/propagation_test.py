"""What stays sharded, and that each rule is true of the operation it is for.

Every row of the table that keeps a tensor sharded is also run: the operation
on each rank's part against the part of what the whole operation makes.
"""

import inspect

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tfscale.tensor_parallel.propagation import operation_rules
from tfscale.tensor_parallel.propagation import propagation
from tfscale.tensor_parallel.propagation.layer_calls import LayerCall
from tfscale.tensor_parallel.propagation.layer_calls import Sink
from tfscale.tensor_parallel.propagation.layer_calls import Source
from tfscale.tensor_parallel.propagation.layer_calls import Trace

RANKS = 2
# Sizes that differ, so that no mix-up of dims gives a right shape. The sharded
# dim is the second one unless a row says otherwise.
SHAPE = (2, 4, 6)


def whole(*shape):
    values = np.random.default_rng(3).uniform(-1, 1, shape)
    return tf.constant(values, "float32")


def dynamic(x, *entries):
    """A shape of integers, and of sizes read from x where `None` stands."""
    shape = tf.shape(x)
    return tf.stack(
        [
            shape[i] if entry is None else entry
            for i, entry in enumerate(entries)
        ]
    )


# name, operation, sharded dim of the output.
SHARDED = (
    ("relu", tf.nn.relu, 1),
    ("gelu", tf.nn.gelu, 1),
    ("gelu_tanh", lambda x: tf.nn.gelu(x, approximate=True), 1),
    ("silu", tf.nn.silu, 1),
    ("leaky_relu", tf.nn.leaky_relu, 1),
    ("cast", lambda x: tf.cast(x, "float64"), 1),
    ("is_positive", lambda x: x > 0.0, 1),
    ("clip", lambda x: tf.clip_by_value(x, -0.1, 0.1), 1),
    ("identity_n", lambda x: tf.identity_n([x, whole(3)])[0], 1),
    ("add_itself", lambda x: x + x, 1),
    ("add_n", lambda x: tf.add_n([x, x, x]), 1),
    ("add_scalar", lambda x: 1.0 + x, 1),
    ("add_row", lambda x: x + whole(6), 1),
    ("multiply_more_dims", lambda x: whole(5, 1, 1, 6) * x, 2),
    ("multiply_size_one", lambda x: x * whole(2, 1, 6), 1),
    ("select", lambda x: tf.where(whole(1, 6) > 0, x, -1.0), 1),
    ("select_made", lambda x: tf.where(x > 0, x, whole(2, 1, 1)), 1),
    ("bias_add", lambda x: tf.nn.bias_add(x, whole(6)), 1),
    ("matmul_free_rows", lambda x: x @ whole(2, 6, 3), 1),
    ("matmul_broadcast", lambda x: x @ whole(6, 3), 1),
    ("matmul_batch", lambda x: tf.matmul(x, x, transpose_b=True), 0, 0),
    ("matmul_free_columns", lambda x: whole(2, 3, 4) @ x, 2, 2),
    ("matmul_transposed", lambda x: tf.matmul(x, whole(2, 4, 3), True), 1, 2),
    ("matmul_adjoint", lambda x: tf.matmul(whole(2, 3, 6), x, False, True), 2),
    ("matmul_2d", lambda x: tf.matmul(x[0], whole(6, 3)), 0),
    ("einsum", lambda x: tf.einsum("abc,cd->dba", x, whole(6, 5)), 1),
    ("einsum_both", lambda x: tf.einsum("abc,abd->acbd", x, x), 2),
    (
        "einsum_ellipsis",
        lambda x: tf.einsum("...c,cd->...d", x, whole(6, 5)),
        1,
    ),
    ("transpose", lambda x: tf.transpose(x, (1, 2, 0)), 0),
    ("softmax", tf.nn.softmax, 1),
    ("log_softmax", tf.nn.log_softmax, 1),
    ("sum", lambda x: tf.reduce_sum(x, 0), 0),
    ("mean_kept", lambda x: tf.reduce_mean(x, (0, -1), keepdims=True), 1),
    ("maximum", lambda x: tf.reduce_max(x, -1), 1),
    ("product", lambda x: tf.reduce_prod(x, [2]), 1),
    ("any", lambda x: tf.reduce_any(x > 0.9, -1), 1),
    ("variance", lambda x: tf.math.reduce_variance(x, -1), 1),
    ("argmax", lambda x: tf.argmax(x, -1), 1),
    ("top_k", lambda x: tf.math.top_k(x, 3).indices, 1),
    ("expand_before", lambda x: tf.expand_dims(x, 0), 2),
    ("expand_behind", lambda x: tf.expand_dims(x, -1), 1),
    ("squeeze", lambda x: tf.squeeze(x[:1], 0), 0),
    ("concat", lambda x: tf.concat([x, x], -1), 1),
    ("stack", lambda x: tf.stack([x, x], 1), 2),
    ("stack_last", lambda x: tf.stack([x, -x], -1), 1),
    ("unstack", lambda x: tf.unstack(x, axis=0)[1], 0),
    ("split", lambda x: tf.split(x, 3, -1)[1], 1),
    ("split_sizes", lambda x: tf.split(x, [2, 4], -1)[1], 1),
    ("slice", lambda x: tf.slice(x, (0, 0, 2), (2, -1, 3)), 1),
    ("index", lambda x: x[0], 0),
    ("index_last", lambda x: x[..., 2], 1),
    ("index_range", lambda x: x[:, :, 1:3], 1),
    ("index_all", lambda x: x[:, 0:4, ::2], 1),
    ("index_new", lambda x: x[:, None, :, tf.newaxis, ::-1], 2),
    ("index_ellipsis", lambda x: x[1:, ..., None], 1),
    ("gather", lambda x: tf.gather(x, [2, 0, 0], axis=-1), 1),
    ("gather_first", lambda x: tf.gather(x, [[1, 0, 0]], axis=0), 2),
    (
        "gather_batch",
        lambda x: tf.gather(x, tf.argsort(x), axis=2, batch_dims=2),
        1,
    ),
    (
        "embedding",
        lambda x: tf.gather(whole(9, 3), tf.cast(abs(x * 2), "int32")),
        1,
    ),
    ("tile", lambda x: tf.tile(x, (3, 1, 2)), 1),
    ("pad", lambda x: tf.pad(x, ((1, 2), (0, 0), (0, 3))), 1),
    (
        "pad_value",
        lambda x: tf.pad(x, ((1, 2), (0, 0), (0, 3)), "CONSTANT", 7),
        1,
    ),
    ("pad_mirror", lambda x: tf.pad(x, ((1, 0), (0, 0), (0, 3)), "REFLECT"), 1),
    ("cumsum", lambda x: tf.cumsum(x, -1), 1),
    ("cumprod", lambda x: tf.math.cumprod(x, 0), 1),
    ("reverse", lambda x: tf.reverse(x, (0, 2)), 1),
    ("band_part", lambda x: tf.linalg.band_part(x[:, :, None], -1, 0), 1),
    (
        "max_pool",
        lambda x: tf.nn.max_pool2d(x[:, :, :, None], (1, 2), 1, "SAME"),
        1,
    ),
    (
        "max_pool_channels",
        lambda x: tf.nn.max_pool2d(
            tf.transpose(x, (0, 2, 1))[None], 2, 1, "SAME"
        ),
        3,
    ),
    (
        "avg_pool_channels",
        lambda x: tf.nn.avg_pool2d(x[None], 2, 2, "SAME"),
        3,
        2,
    ),
    ("resize", lambda x: tf.image.resize(x[None], (5, 9)), 3, 2),
    # Reshapes: what shrinks is -1 or was read from the tensor.
    ("reshape_split", lambda x: tf.reshape(x, (2, -1, 2, 6)), 1),
    ("reshape_merge", lambda x: tf.reshape(x, (2, -1)), 1),
    ("reshape_before", lambda x: tf.reshape(x, (1, 2, 1, -1, 3, 2)), 3),
    ("reshape_behind", lambda x: tf.reshape(x, (2, -1, 2, 3)), 1),
    ("reshape_divided_last", lambda x: tf.reshape(x, (4, 2, -1)), 2, 2),
    ("reshape_batch", lambda x: tf.reshape(x, (8, -1)), 1, 2),
)

# The same for an unknown batch size, where Keras reads shapes as it runs.
DIVIDED_WITH_UNKNOWN_BATCH = (
    ("zeros_like", tf.zeros_like, 1),
    ("repeat_other", lambda x: tf.repeat(x, 3, axis=2), 1),
    ("repeat", lambda x: tf.repeat(x, 3, axis=1), 1),
    (
        "reshape_dynamic",
        lambda x: tf.reshape(x, dynamic(x, 2, None, 3, 2)),
        1,
    ),
    (
        "reshape_concatenated",
        lambda x: tf.reshape(x, tf.concat([tf.shape(x)[:2], (2, 3)], 0)),
        1,
    ),
    (
        "reshape_like",
        lambda x: tf.reshape(tf.expand_dims(x, 0), tf.shape(x)),
        1,
    ),
    ("broadcast", lambda x: tf.broadcast_to(x, dynamic(x, 2, None, 6)), 1),
    (
        "broadcast_to_more",
        lambda x: tf.broadcast_to(x, tf.concat([[3], tf.shape(x)], 0)),
        2,
    ),
    (
        "broadcast_to_part",
        lambda x: tf.broadcast_to(whole(2, 1, 6), tf.shape(x)),
        1,
    ),
    (
        "unstacked_shape",
        lambda x: tf.reshape(x, (*tf.unstack(tf.shape(x)), 1)),
        1,
    ),
    ("fill", lambda x: tf.fill(tf.shape(x)[1:], 3.0), 0),
    ("ones", lambda x: tf.ones(tf.shape(x)), 1),
)

# name, operation, a word of the reason; the second dim of x is sharded.
FAILS = (
    ("no_rule", tf.math.bessel_i0, "no rule"),
    ("add_whole", lambda x: x + whole(4, 6), "is whole"),
    ("add_other_dim", lambda x: x + tf.transpose(x, (0, 2, 1))[:, :4, :1], ""),
    ("bias_of_sharded", lambda x: tf.nn.bias_add(x[..., 0], whole(4)), "whole"),
    ("select_whole", lambda x: tf.where(whole(4, 1) > 0, x, 0), "is whole"),
    ("matmul_inner", lambda x: tf.matmul(x, whole(2, 4, 3), True), "apart"),
    ("matmul_partial_sum", lambda x: tf.matmul(x, x, True), "apart"),
    ("matmul_both_free", lambda x: tf.matmul(x, x, False, True), "different"),
    ("einsum_inner", lambda x: tf.einsum("abc,b->ac", x, whole(4)), "apart"),
    ("einsum_whole", lambda x: tf.einsum("abc,b->abc", x, whole(4)), "whole"),
    ("einsum_diagonal", lambda x: tf.einsum("abb->ab", x[..., :4]), "diagonal"),
    ("softmax", lambda x: tf.nn.softmax(x[..., 0]), "apart"),
    ("sum", lambda x: tf.reduce_sum(x, 1), "apart"),
    ("sum_kept", lambda x: tf.reduce_sum(x, -2, keepdims=True), "apart"),
    ("mean_of_all", tf.reduce_mean, "apart"),
    ("argmax", lambda x: tf.argmax(x, 1), "apart"),
    ("top_k", lambda x: tf.math.top_k(x[..., 0]).values, "apart"),
    ("squeeze_any", lambda x: tf.squeeze(x[:, :, :1]), "no axis"),
    ("concat", lambda x: tf.concat([x, x], 1), "apart"),
    ("concat_whole", lambda x: tf.concat([x, whole(*SHAPE)], 0), "is whole"),
    ("stack_whole", lambda x: tf.stack([x, whole(*SHAPE)]), "is whole"),
    ("unstack", lambda x: tf.unstack(x, axis=1)[0], "apart"),
    ("split", lambda x: tf.split(x, 2, 1)[0], "apart"),
    ("slice", lambda x: tf.slice(x, (0, 1, 0), (2, -1, 6)), "apart"),
    (
        "slice_whole_size",
        lambda x: tf.slice(x, (0, 0, 1), (*SHAPE[:2], 2)),
        "",
    ),
    ("index", lambda x: x[:, 0], "apart"),
    ("index_range", lambda x: x[:, :3], "apart"),
    ("index_reversed", lambda x: x[:, ::-1], "apart"),
    ("gather", lambda x: tf.gather(x, [0, 1], axis=1), "apart"),
    ("gather_flat", lambda x: tf.gather_nd(x, [[0, 0]]), "no rule"),
    ("tile", lambda x: tf.tile(x, (1, 2, 1)), "apart"),
    ("pad", lambda x: tf.pad(x, ((0, 0), (0, 1), (0, 0))), "apart"),
    ("cumsum", lambda x: tf.cumsum(x, 1), "apart"),
    ("reverse", lambda x: tf.reverse(x, (1,)), "apart"),
    ("band_part", lambda x: tf.linalg.band_part(x, -1, 0), "apart"),
    ("sort", lambda x: tf.sort(x, axis=1), "apart"),
    ("norm", lambda x: tf.nn.l2_loss(x), "no rule"),
    (
        "convolution",
        lambda x: tf.nn.conv1d(
            tf.transpose(x, (0, 2, 1)), whole(2, 4, 3), 1, "SAME"
        ),
        "",
    ),
    ("pool", lambda x: tf.nn.avg_pool1d(x, 2, 1, "SAME"), "apart"),
    ("resize", lambda x: tf.image.resize(x[..., None], (5, 9)), "apart"),
    ("branches", lambda x: tf.cond(x[0, 0, 0] > 0, lambda: x, lambda: -x), ""),
    (
        "loop",
        lambda x: tf.while_loop(lambda y: True, lambda y: [y + 1], [x])[0],
        "no rule",
    ),
    ("function", lambda x: tf.function(lambda y: y + 1)(x), "no rule"),
    ("print", lambda x: tf.raw_ops.Print(input=x, data=[x]), "no rule"),
    # Run on a part, these ask for the whole size.
    ("reshape_constant", lambda x: tf.reshape(x, (2, 4, 3, 2)), "whole dim 1"),
    ("reshape_split", lambda x: tf.reshape(x, (-1, 2, 2, 6)), "whole dim 1"),
    ("reshape_batch", lambda x: tf.reshape(x, (-1, 24)), "whole dim 1"),
    ("broadcast", lambda x: tf.broadcast_to(x, (3, *SHAPE)), "whole dim 2"),
    # Parts in memory order are other parts.
    ("reshape_mixed", lambda x: tf.reshape(x, (-1, 6)), "lost"),
    ("reshape_flat", lambda x: tf.reshape(x, (-1,)), "lost"),
    ("reshape_odd", lambda x: tf.reshape(x, (2, 3, -1)), "lost"),
    ("add_dropout", lambda x: x * tf.random.uniform(SHAPE), "is whole"),
)
FAILS_WITH_UNKNOWN_BATCH = (
    (
        "size_as_number",
        lambda x: x / tf.sqrt(tf.cast(tf.shape(x)[1], "float32")),
        "local size",
    ),
    ("size_in_sum", lambda x: x[:, : tf.shape(x)[1] - 1], "size"),
    ("count", lambda x: x / tf.cast(tf.size(x), "float32"), "local size"),
    ("range", lambda x: tf.range(tf.shape(x)[1]), "size"),
    (
        "reshape_of_unknown_size",
        lambda x: tf.reshape(x, (tf.shape(x)[0], -1)),
        "lost",
    ),
    (
        "reshape_whole",
        lambda x: tf.reshape(whole(48), tf.shape(x)),
        "operand is whole",
    ),
    (
        "reshape_wrong_dim",
        lambda x: tf.reshape(x, (tf.shape(x)[1], -1)),
        "",
    ),
    (
        "reshape_local_elsewhere",
        lambda x: tf.reshape(x, (tf.shape(x)[0], 6, tf.shape(x)[1])),
        "local size of another dim",
    ),
    (
        "reshape_other_batch",
        lambda x: tf.reshape(x, (-1, tf.shape(x)[1], 12)),
        "lost",
    ),
    (
        "local_product",
        lambda x: tf.zeros([tf.shape(x)[1] * tf.shape(x)[1]]),
        "multiplies local sizes",
    ),
    (
        "local_squared",
        lambda x: tf.zeros([tf.shape(x)[1], tf.shape(x)[1]]),
        "more than one",
    ),
    (
        "fill_with_size",
        lambda x: tf.fill([3], tf.shape(x)[1]),
        "",
    ),
)


def part(value, dim, rank, num_ranks):
    return tf.split(value, num_ranks, dim)[rank]


def analyze(function, shape, dim, num_ranks=RANKS):
    """The result for one source and the output of a function of it."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder("float32", shape)
        result = function(x)
    calls = [LayerCall("source", range(1), sources=(Source(x, dim),))]
    found = propagation.propagate(Trace(graph, calls), num_ranks=num_ranks)
    return found, result


def all_rows():
    unknown_batch = (None, *SHAPE[1:])
    for rows, shape in (
        (SHARDED, SHAPE),
        (FAILS, SHAPE),
        (DIVIDED_WITH_UNKNOWN_BATCH, unknown_batch),
        (FAILS_WITH_UNKNOWN_BATCH, unknown_batch),
    ):
        for name, function, *_ in rows:
            yield f"{name}_{len(rows)}", function, shape


class OperationsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.named_parameters(*SHARDED)
    def test_stays_sharded(self, function, made, dim=1):
        found, result = analyze(function, SHAPE, dim)
        self.assertEqual(found.gathered, {})
        self.assertEqual(found.dim(result), made)

    @parameterized.named_parameters(*DIVIDED_WITH_UNKNOWN_BATCH)
    def test_stays_divided_with_unknown_batch(self, function, made, dim=1):
        found, result = analyze(function, (None, *SHAPE[1:]), dim)
        self.assertEqual(found.gathered, {})
        self.assertEqual(found.dim(result), made)

    @parameterized.named_parameters(*FAILS)
    def test_is_gathered(self, function, reason):
        found, _ = analyze(function, SHAPE, 1)
        self.assertEqual(found.sharded, frozenset())
        self.assertIn(reason, found.gathered["source"])

    @parameterized.named_parameters(*FAILS_WITH_UNKNOWN_BATCH)
    def test_is_gathered_with_unknown_batch(self, function, reason):
        found, _ = analyze(function, (None, *SHAPE[1:]), 1)
        self.assertEqual(found.sharded, frozenset())
        self.assertIn(reason, found.gathered["source"])

    @parameterized.named_parameters(*all_rows())
    def test_what_stays_divided_makes_its_part(self, function, shape):
        # Of any dim and number of ranks: whatever is said has to be true. With
        # as many ranks as entries, local sizes are 1 and could be broadcast.
        expected = None
        for dim, size in enumerate(shape):
            for num_ranks in (2, 3, 4, 6):
                if size is None or size % num_ranks:
                    continue
                found, result = analyze(function, shape, dim, num_ranks)
                if found.dim(result) is not None:
                    with self.subTest(dim=dim, num_ranks=num_ranks):
                        made = found.dim(result)
                        expected = expected or self._run(
                            function, whole(*SHAPE)
                        )
                        self._check_parts(
                            function, made, dim, num_ranks, *expected
                        )

    @parameterized.parameters(sorted(operation_rules.ELEMENTWISE))
    def test_elementwise_operations_are_so(self, name):
        operation = getattr(tf.raw_ops, name)
        operands = [
            parameter
            for parameter in inspect.signature(operation).parameters.values()
            if parameter.default is parameter.empty
        ]
        special = {
            "AddN": lambda x: operation(inputs=[x, x]),
            "Cast": lambda x: operation(x=x, DstT=tf.int32),
            "CheckNumerics": lambda x: operation(tensor=x, message=""),
            "SelectV2": lambda x: operation(condition=x > 0, t=x, e=-x),
        }

        def same(x):
            return operation(**{operand.name: x for operand in operands})

        function = special.get(name, same)
        x = 5 * whole(*SHAPE)
        # Most take numbers, some only integers or only truth values.
        for dtype in ("float32", "int32", "bool"):
            try:
                expected = function(tf.cast(x, dtype))
                break
            except (TypeError, ValueError, tf.errors.InvalidArgumentError):
                continue
        for dim in (1, 2):
            for rank in range(RANKS):
                position = dim, rank, RANKS
                actual = function(tf.cast(part(x, *position), dtype))
                self.assertAllClose(
                    actual, part(expected, *position), 1e-6, 1e-6
                )

    def _check_parts(self, function, made, dim, num_ranks, expected, gradient):
        x = whole(*SHAPE)
        for rank in range(num_ranks):
            position = made, rank, num_ranks
            actual, local_gradient = self._run(
                function,
                part(x, dim, rank, num_ranks),
                position,
                expected.shape,
            )
            # The last bit depends on where an entry lies in a vector register.
            self.assertAllClose(actual, part(expected, *position), 1e-6, 1e-6)
            if gradient is None:
                self.assertIsNone(local_gradient)
            else:
                expected_gradient = part(gradient, dim, rank, num_ranks)
                self.assertAllClose(
                    local_gradient, expected_gradient, 1e-6, 1e-6
                )

    def _run(self, function, x, position=None, shape=None):
        """The output and the gradient if each entry has its own weight."""
        with tf.GradientTape() as tape:
            tape.watch(x)
            made = function(x)
            weights = whole(*(shape or made.shape))
            if position is not None:
                weights = part(weights, *position)
            if not made.dtype.is_floating:
                return made, None
            loss = tf.reduce_sum(tf.cast(weights, made.dtype) * made)
        gradient = tape.gradient(loss, x)
        if gradient is not None:
            gradient = tf.convert_to_tensor(gradient)
        return made, gradient


class Graph:
    """A graph written by hand, with what its layer calls declare."""

    def __init__(self):
        self.graph = tf.Graph()
        self.calls = []

    def input(self, *shape, dtype="float32"):
        with self.graph.as_default():
            return tf.compat.v1.placeholder(dtype, shape)

    def run(self, function, *args):
        with self.graph.as_default():
            return function(*args)

    def column(self, key, dim, function, *args):
        start = len(self.graph.get_operations())
        made = self.run(function, *args)
        self._add(key, start, sources=(Source(made, dim),))
        return made

    def row(self, key, dim, function, *args):
        start = len(self.graph.get_operations())
        made = self.run(function, *args)
        sinks = tuple(Sink(tensor, dim) for tensor in args)
        self._add(key, start, sinks=sinks, outputs=(made,))
        return made

    def local(self, key, dim, function, x):
        start = len(self.graph.get_operations())
        made = self.run(function, x)
        self._add(key, start, sinks=(Sink(x, dim, Source(made, dim)),))
        return made

    def _add(self, key, start, **declared):
        end = len(self.graph.get_operations())
        self.calls.append(LayerCall(key, range(start, end), **declared))

    def propagate(self, outputs=(), num_ranks=RANKS, **kwargs):
        trace = Trace(self.graph, self.calls, outputs)
        return propagation.propagate(trace, num_ranks=num_ranks, **kwargs)


def dense(x, units=8):
    return x @ whole(x.shape[-1], units)


class GraphTest(tf.test.TestCase):
    def test_divided_from_column_to_row(self):
        g = Graph()
        hidden = g.column("up", 1, dense, g.input(None, 6))
        g.row("down", 1, dense, g.run(tf.nn.relu, hidden))
        found = g.propagate()
        self.assertEqual(found.sharded, {"up"})
        self.assertEqual(found.sink_sharded, {"down"})
        self.assertEqual(found.gathered, {})

    def test_operations_inside_of_a_layer_are_not_looked_at(self):
        g = Graph()
        hidden = g.column("up", 1, dense, g.input(None, 6))
        g.row("down", 1, lambda x: tf.reverse(x, (1,)), hidden)
        self.assertEqual(g.propagate().sink_sharded, {"down"})

    def test_a_layer_without_a_sink_takes_whole_inputs(self):
        g = Graph()
        hidden = g.column("up", 1, dense, g.input(None, 6))
        again = g.column("again", 1, dense, hidden)
        g.row("down", 1, dense, again)
        found = g.propagate()
        self.assertEqual(found.sharded, {"again"})
        self.assertIn("'again' takes", found.gathered["up"])
        self.assertEqual(found.sink_sharded, {"down"})

    def test_a_sink_takes_only_its_own_dim(self):
        g = Graph()
        hidden = g.column("up", 1, dense, g.input(4, 6))
        g.row("down", 0, dense, hidden)
        found = g.propagate()
        self.assertIn("'down'", found.gathered["up"])
        self.assertEmpty(found.sink_sharded)

    def test_a_layer_of_two_sinks_takes_both_or_none(self):
        g = Graph()
        x = g.input(None, 8)
        left = g.column("left", 1, dense, x)
        right = g.column("right", 1, dense, x)
        g.row("both", 1, tf.add, left, right)
        g.row("one", 1, tf.add, left, x)
        found = g.propagate()
        # `left` cannot go to "one", and then not to "both".
        self.assertEqual(set(found.gathered), {"left", "right"})
        self.assertEmpty(found.sink_sharded)

    def test_a_local_layer_passes_it_on(self):
        g = Graph()
        hidden = g.column("up", 2, dense, g.input(None, 5, 6))
        normal = g.local("norm", 2, lambda x: x * whole(8), hidden)
        g.row("down", 2, dense, g.run(tf.nn.relu, normal))
        found = g.propagate()
        self.assertEqual(found.sharded, {"up"})
        self.assertEqual(found.sink_sharded, {"norm", "down"})

    def test_what_a_local_layer_passed_on_is_gathered_at_the_source(self):
        g = Graph()
        hidden = g.column("up", 1, dense, g.input(None, 6))
        normal = g.local("norm", 1, lambda x: x * whole(8), hidden)
        g.run(tf.nn.softmax, normal)
        found = g.propagate()
        self.assertIn("Softmax", found.gathered["up"])
        self.assertEmpty(found.sink_sharded)

    def test_sources_may_join(self):
        g = Graph()
        x = g.input(None, 6)
        gate = g.run(tf.nn.silu, g.column("gate", 1, dense, x))
        g.row(
            "down",
            1,
            dense,
            g.run(tf.multiply, gate, g.column("up", 1, dense, x)),
        )
        found = g.propagate()
        self.assertEqual(found.sharded, {"gate", "up"})
        self.assertEqual(found.sink_sharded, {"down"})

    def test_sources_divided_along_different_dims_do_not_join(self):
        g = Graph()
        x = g.input(4, 4)
        left = g.column("left", 0, dense, x)
        right = g.column("right", 1, dense, x)
        g.run(tf.add, left, right)
        self.assertEqual(set(g.propagate().gathered), {"left", "right"})

    def test_gathering_one_source_gathers_what_joins_it(self):
        # c joins b joins a, and a cannot stay sharded for another reason.
        g = Graph()
        x = g.input(None, 6)
        a, b, c, d = (g.column(key, 1, dense, x) for key in "abcd")
        g.run(tf.add, c, b)
        g.run(tf.add, a, b)
        g.row("down", 1, dense, d)
        g.run(tf.nn.softmax, a)
        found = g.propagate()
        self.assertEqual(set(found.gathered), {"a", "b", "c"})
        self.assertEqual(found.sharded, {"d"})
        self.assertEqual(found.sink_sharded, {"down"})

    def test_a_sink_of_a_gathered_source_gets_it_whole(self):
        g = Graph()
        hidden = g.column("up", 1, dense, g.input(None, 6))
        g.row("down", 1, dense, hidden)
        g.run(tf.nn.softmax, hidden)
        self.assertEmpty(g.propagate().sink_sharded)

    def test_a_whole_operand_that_needs_a_gradient(self):
        g = Graph()
        x, scale = g.input(None, 6), g.input(1)
        hidden = g.column("up", 1, dense, x)
        scaled = g.run(lambda: hidden * tf.exp(scale))
        g.row("down", 1, dense, scaled)
        self.assertEqual(g.propagate().sharded, {"up"})
        found = g.propagate(differentiable=[scale])
        self.assertIn("part of its gradient", found.gathered["up"])

    def test_no_gradient_flows_through_integers_masks_and_stops(self):
        g = Graph()
        x, scale = g.input(None, 6), g.input(1)
        hidden = g.column("up", 1, dense, x)
        g.run(lambda: tf.where(scale > 0, hidden, 0.0))
        g.run(lambda: hidden * tf.cast(tf.cast(scale, "int32"), "float32"))
        g.run(lambda: hidden * tf.stop_gradient(scale))
        g.run(lambda: hidden > scale)
        found = g.propagate(differentiable=[x, scale])
        self.assertEqual(found.sharded, {"up"})

    def test_the_output_of_a_row_is_no_operand_of_a_divided_tensor(self):
        g = Graph()
        x = g.input(None, 6)
        up = g.column("up", 1, dense, x)
        down = g.row("down", 1, lambda x: dense(x, 1), up)
        g.run(tf.multiply, g.column("next", 1, dense, x), down)
        found = g.propagate(differentiable=[x])
        self.assertEqual(found.sharded, {"up"})
        self.assertIn("part of its gradient", found.gathered["next"])

    def test_outputs_of_the_model_are_whole(self):
        g = Graph()
        logits = g.column("head", 1, dense, g.input(None, 6))
        self.assertEqual(g.propagate().sharded, {"head"})
        found = g.propagate(outputs=[logits])
        self.assertIn("leaves the model", found.gathered["head"])

    def test_what_a_layer_keeps_to_itself_is_not_used_by_others(self):
        g = Graph()
        inner = []

        def call(x):
            inner.append(dense(x))
            return tf.nn.relu(inner[0])

        g.row("down", 1, dense, g.column("up", 1, call, g.input(None, 6)))
        self.assertEqual(g.propagate().sharded, {"up"})
        g.run(tf.nn.relu, inner[0])
        self.assertIn("inside", g.propagate().gathered["up"])

    def test_a_constant_made_inside_of_a_layer_may_be_used_by_others(self):
        g = Graph()
        cache = []

        def call(x):
            cache.append(whole(8) + 1)
            return dense(x) + cache[0]

        g.column("up", 1, call, g.input(None, 6))
        g.run(tf.nn.relu, cache[0])
        self.assertEqual(g.propagate().sharded, {"up"})

    def test_a_custom_gradient_is_followed(self):
        @tf.custom_gradient
        def doubled(x):
            return x * 2, lambda dy: dy * 2

        @tf.custom_gradient
        def normalized(x):
            return x * 2, lambda dy: dy - tf.reduce_mean(dy, -1, keepdims=True)

        for function, sharded in ((doubled, {"up"}), (normalized, set())):
            g = Graph()
            hidden = g.column("up", 1, dense, g.input(None, 6))
            g.run(function, hidden)
            found = g.propagate()
            self.assertEqual(found.sharded, sharded)
        self.assertIn("Mean", found.gathered["up"])

    def test_a_custom_gradient_that_is_whole(self):
        @tf.custom_gradient
        def told(x):
            return x * 2, lambda dy: whole(4, 8)

        g = Graph()
        g.run(told, g.column("up", 1, dense, g.input(4, 6)))
        self.assertIn("as it is", g.propagate().gathered["up"])

    def test_a_custom_gradient_that_cannot_be_traced(self):
        @tf.custom_gradient
        def hopeless(x):
            return x * 2, lambda dy: 1 / 0

        g = Graph()
        g.run(hopeless, g.column("up", 1, dense, g.input(None, 6)))
        self.assertIn("division by zero", g.propagate().gathered["up"])

    def test_a_model_may_be_looked_at_again(self):
        # The gradients that were looked at are behind it in the graph.
        g = Graph()
        hidden = g.column("up", 1, dense, g.input(None, 6))
        g.row("down", 1, dense, g.run(tf.nn.silu, hidden))
        before = len(g.graph.get_operations())
        for _ in range(3):
            found = g.propagate()
            self.assertEqual(found.sharded, {"up"})
            self.assertEqual(found.sink_sharded, {"down"})
        self.assertGreater(len(g.graph.get_operations()), before)
        self.assertLen(Trace(g.graph, g.calls).operations, before)

    def test_random_tensors_of_a_shape_are_drawn_on_each_rank(self):
        g = Graph()
        hidden = g.column("up", 1, dense, g.input(None, 6))
        made = g.run(
            lambda: tf.random.stateless_uniform(tf.shape(hidden), (1, 2))
        )
        found = g.propagate()
        self.assertEqual(found.sharded, {"up"})
        self.assertEqual(found.dim(made), 1)

    def test_more_ranks_than_a_reshaped_dim_has_entries(self):
        g = Graph()
        hidden = g.column("up", 1, dense, g.input(2, 6))
        split = g.run(tf.reshape, hidden, (2, -1, 4))
        self.assertEqual(g.propagate().dim(split), 1)
        self.assertIn("lost", g.propagate(num_ranks=4).gathered["up"])

    def test_two_unknown_sizes_may_have_changed_places(self):
        g = Graph()
        hidden = g.column("up", 1, tf.transpose, g.input(None, 4, None))
        shape = g.run(tf.shape, hidden)
        g.run(lambda: tf.reshape(hidden, (-1, shape[1], shape[0])))
        self.assertIn("lost", g.propagate().gathered["up"])

    def test_constant_shapes_are_taken_for_sizes_read_if_retraced(self):
        g = Graph()
        hidden = g.column("up", 2, dense, g.input(None, 5, 6))
        split = g.run(
            lambda: tf.reshape(hidden, (tf.shape(hidden)[0], 5, 4, 2))
        )
        self.assertIn("whole dim 2", g.propagate().gathered["up"])
        self.assertEqual(g.propagate(retraced=True).dim(split), 2)


if __name__ == "__main__":
    tf.test.main()
