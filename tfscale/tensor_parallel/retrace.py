"""Checks that a rank's trace of a model matches that of one device.

A rank runs the model's Python on its shards, and Python may read static shapes.
A result computed from a local size may be wrong (`1 / sqrt(x.shape[-1])`), it
may branch (`if x.shape[2] > 1`), and a size from elsewhere does not shrink with
the tensor (`reshape(x, (-1, self.num_heads, 8))`). So both traces are compared
operation by operation: they have to be the same but for sizes in shapes, and
each tensor has to have the shape that is expected of it.
"""

from collections.abc import Hashable

import numpy as np
import tensorflow as tf

from tfscale._internals import attributes
from tfscale.graphs import walks
from tfscale.tensor_parallel.propagation import custom_gradients
from tfscale.tensor_parallel.propagation.labels import NoRule
from tfscale.tensor_parallel.propagation.labels import Sharded
from tfscale.tensor_parallel.propagation.layer_calls import Trace
from tfscale.tensor_parallel.propagation.propagation import Propagation

# Operations that may pass on a size that differs between the traces ...
_JOINS = ("Cast", "ConcatV2", "Identity", "Pack")
# ... until it is the second operand of these.
_SHAPED = ("BroadcastTo", "Reshape")


class _Different(Exception):
    """The traces differ; later operations have no partners."""


def differing_sources(
    whole: Trace, local: Trace, found: Propagation, *, num_ranks: int
) -> dict[Hashable, str]:
    """Keys of sources that cannot stay sharded, and why.

    `whole` is what `propagate` was given, with `retraced=True`, and `found`
    what it returned; `local` the model traced again with local shapes. While
    there are differences, trace again without those sources.
    """
    return _Comparison(whole, local, found.states, num_ranks).run()


def different_operations(
    whole: Trace, local: Trace, states: dict, num_ranks: int
) -> dict:
    """Reasons why the trace of a rank differs, by index of operation."""
    comparison = _Comparison(whole, local, states, num_ranks)
    # Shapes that are read as numbers cannot be followed to a source.
    comparison.may_differ = True
    comparison.run()
    return comparison.reasons


class _Comparison:
    def __init__(self, whole, local, states, num_ranks):
        self._whole, self._local = whole, local
        self._states = states
        self._num_ranks = num_ranks
        self._operations = whole.operations, local.operations
        self._partner = {}  # name of a tensor -> name in the other trace
        self._sizes = set()  # names of local tensors that hold other sizes
        self._nearest = frozenset()  # keys at the last sharded tensor
        self._problems = {}
        self._index = 0
        self.reasons = {}
        self.may_differ = False

    def run(self):
        calls = [
            sorted(trace.calls, key=lambda call: call.operations.start)
            for trace in (self._whole, self._local)
        ]
        # Operations between two calls are compared by themselves, so that all
        # differences are found at once.
        starts, done = [0, 0], 0
        for call, other in zip(*calls):
            if call.key != other.key:
                break
            runs = call.operations, other.operations
            self._between(starts, [run.start for run in runs])
            starts = [run.stop for run in runs]
            shards = [*call.sources, *call.sinks]
            keys = self._keys(shard.tensor for shard in shards)
            self._try(self._call, call, other, keys=keys)
            done += 1
        is_complete = done == len(calls[0])
        ends = [
            len(operations)
            if is_complete or done == len(of_trace)
            else of_trace[done].operations.start
            for operations, of_trace in zip(self._operations, calls)
        ]
        self._between(starts, ends)
        if is_complete:
            self._try(self._outputs, keys=frozenset())
        elif not self._problems:
            # Python failed, or went to another layer, before the next call.
            # Nothing is known of later calls.
            key = calls[0][done].key
            self._blame(self._nearest, f"a rank fails before layer {key!r}")
        return self._problems

    def _between(self, starts, ends):
        runs = [
            operations[start:end]
            for operations, start, end in zip(self._operations, starts, ends)
        ]
        keys = self._keys(tensor for op in runs[0] for tensor in op.inputs)
        self._try(self._run, *runs, starts[0], keys=keys)

    def _try(self, compare, *args, keys):
        self._nearest = keys or self._nearest
        try:
            compare(*args)
        except _Different as error:
            self._blame(keys or self._nearest, str(error))

    def _blame(self, keys, reason):
        self.reasons.setdefault(self._index, reason)
        if not keys and not self._problems and not self.may_differ:
            raise ValueError(
                "A model must be traced the same way each time. Received: "
                f"traces that differ where nothing is sharded: {reason}. Look "
                "for a choice in `call` that depends on something other than "
                "its arguments."
            )
        for key in keys:
            self._problems.setdefault(key, reason)

    def _keys(self, tensors):
        states = (self._states.get(tensor.name) for tensor in tensors)
        return frozenset().union(*(state[1] for state in states if state))

    def _run(self, operations, others, start):
        self._index = start
        for number, (op, other) in enumerate(zip(operations, others)):
            self._index = start + number
            if op.type != other.type:
                raise _Different(
                    f"{op.type} {op.name!r} is {other.type} {other.name!r} on "
                    "a rank"
                )
            self._operation(op, other)
        if len(operations) != len(others):
            first = repr(operations[0].name) if operations else "a layer"
            raise _Different(
                f"a rank makes {len(others)} operations in place of "
                f"{len(operations)}, or fails, after {first}"
            )

    def _call(self, call, other):
        self._index = call.operations.start
        for name in ("sources", "sinks", "inputs", "outputs", "made"):
            if len(getattr(call, name)) != len(getattr(other, name)):
                raise _Different(f"layer {call.key!r} has other {name}")
        calls = call, other
        returned = ([*(x.tensor for x in c.made), *c.outputs] for c in calls)
        for tensor, local in zip(*returned):
            self._partner[tensor.name] = local.name
            self._check_shape(tensor, local)
        given = ([*(x.tensor for x in c.sinks), *c.inputs] for c in calls)
        for tensor, local in zip(*given):
            self._check_partner(tensor, local)
            self._check_shape(tensor, local)
        for number in other.operations:
            for tensor in self._operations[1][number].inputs:
                if tensor.name in self._sizes:
                    raise _Different(f"layer {call.key!r} takes a local size")

    def _outputs(self):
        if len(self._whole.outputs) != len(self._local.outputs):
            raise _Different("a rank's trace has other outputs, or ended early")
        for tensor, local in zip(self._whole.outputs, self._local.outputs):
            self._check_partner(tensor, local)

    def _operation(self, op, other):
        if len(op.inputs) != len(other.inputs):
            raise _Different(f"{op.type} {op.name!r} has other inputs")
        for tensor, local in zip(op.inputs, other.inputs):
            self._check_partner(tensor, local)
        for tensor, local in zip(op.outputs, other.outputs):
            self._partner[tensor.name] = local.name
        try:
            self._check_values(op, other)
            for tensor, local in zip(op.outputs, other.outputs):
                self._check_shape(tensor, local)
            if attributes.GRADIENT_TYPE in op.node_def.attr:
                self._custom_gradient(op, other)
        except _Different as error:
            keys = self._keys((*op.inputs, *op.outputs))
            self._blame(keys or self._nearest, str(error))

    def _custom_gradient(self, op, other):
        """Compares what is sharded of a gradient that was written by hand."""
        states = [self._states.get(x.name, (None,))[0] for x in op.inputs]
        sharded = [isinstance(state, Sharded) for state in states]
        if not any(sharded):
            return
        try:
            whole, local = map(custom_gradients.custom_gradient, (op, other))
        except NoRule as error:
            raise _Different(str(error)) from error
        results = [x for x, is_one in zip(whole.results, sharded) if is_one]
        followed = walks.ancestors([x.op for x in results if x is not None])
        for one, its_partner in zip(whole.operations, local.operations):
            if one.type != its_partner.type:
                raise _Different(f"the gradient of {op.name!r} is another one")
            if one in followed:
                self._operation(one, its_partner)

    def _check_partner(self, tensor, local):
        # None: after a difference that has been blamed already.
        if self._partner.get(tensor.name) not in (None, local.name):
            raise _Different(
                f"{local.name!r} on a rank stands for {tensor.name!r}"
            )

    def _check_values(self, op, other):
        if _attributes(op) != _attributes(other):
            raise _Different(f"{op.type} {op.name!r} has other attributes")
        if op.type == "Const":
            self._check_constant(op.outputs[0], other.outputs[0])
        for index, tensor in enumerate(other.inputs):
            if tensor.name not in self._sizes:
                continue
            made = other.outputs[0]
            state, _ = self._states.get(op.outputs[0].name, (None, None))
            if op.type in _JOINS and made.dtype.is_integer:
                self._sizes.add(made.name)
            elif not (
                op.type in _SHAPED and index == 1 and isinstance(state, Sharded)
            ):
                raise _Different(
                    f"{op.type} {op.name!r} takes another number on a rank"
                )

    def _check_constant(self, tensor, local):
        values = [tf.get_static_value(each) for each in (tensor, local)]
        # Of NaN only the bytes are equal, of strings only the values.
        if np.array_equal(*values) or (
            tensor.dtype.is_floating
            and values[0].tobytes() == values[1].tobytes()
        ):
            return
        if values[0].shape != values[1].shape or not tensor.dtype.is_integer:
            raise _Different(f"{tensor.name!r} has another value on a rank")
        self._sizes.add(local.name)

    def _check_shape(self, tensor, local):
        expected = tensor.shape
        state, _ = self._states.get(tensor.name, (None, None))
        if isinstance(state, Sharded):
            expected = expected.as_list()
            expected[state.dim] //= self._num_ranks
            expected = tf.TensorShape(expected)
        shapes = [
            None if shape.rank is None else shape.as_list()
            for shape in (expected, local.shape)
        ]
        if shapes[0] != shapes[1]:
            raise _Different(
                f"{tensor.name!r} has shape {shapes[1]} on a rank, not "
                f"{shapes[0]}"
            )


def _attributes(op):
    """Attributes, without shapes, values and functions.

    The name of a function differs between traces, and none takes a shard.
    """
    return {
        name: value
        for name, value in op.node_def.attr.items()
        if name not in ("shape", "value")
        and not name.startswith("_")
        and not value.HasField("func")
        and not value.list.func
    }
