"""The call of a model that the first replica traces, and all make.

Forward and backward are most of a step, and the same function of inputs and
variables on all replicas. It is traced once, Grappler optimizes it once, and
its operations are added to the step for each replica. With the update, which is
shared too (update/shared_updates.py), little is left to optimize. So Grappler
does little with the step: its time grows faster than the graph.
"""

import collections
import dataclasses
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale._internals import instances
from tfscale._internals import symbols
from tfscale.context import step_context
from tfscale.graphs import grappler
from tfscale.graphs.subgraph import Subgraph
from tfscale.graphs.subgraph import extract
from tfscale.step import batch_norm

# By type of operation.
_ACTIVATIONS = {"Softmax": tf.nn.softmax, "Sigmoid": tf.nn.sigmoid}


class SharedCall:
    """The first call of a model in a step, for replicas that make it in turn.

    Attributes:
        model: Whose call it is.
    """

    def __init__(self, model: keras.Model):
        self.model = model
        self._traced: list[_Traced | None] = []
        self._counts = collections.Counter()

    def run(self, call: Callable, args: tuple, kwargs: dict) -> Any:
        """Calls `call(*args, **kwargs)`, or adds what a replica traced of it.

        Later calls of a replica, of a user's `compute_loss`, are calls.
        """
        thread = symbols.get_current_replica_id_as_int()
        self._counts[thread] += 1
        tensors = _tensors((args, kwargs))
        is_dense = all(isinstance(x, tf.Tensor) for x in tensors)
        if self._counts[thread] > 1 or not is_dense:
            return call(*args, **kwargs)
        if not self._traced:
            self._traced.append(_trace(self.model, call, args, kwargs))
        (traced,) = self._traced
        if traced is None or traced.specs != _specs(tensors):
            return call(*args, **kwargs)
        return traced.run(tensors)


@dataclasses.dataclass(frozen=True)
class _Traced:
    """A call, as operations.

    Attributes:
        specs: Of its tensors.
        variables: Those that it reads.
        trainable: The numbers of those that have gradients, in this order.
        assigned: Those that it assigns to.
        outputs: The structure of its output.
        activation: Of the output, or None. Losses of Keras look for what a
            softmax or sigmoid was given: each replica has its own.
        has_mask: Whether the output has a mask.
        normalized: For each call of a BatchNormalization, the layer and the
            number of its channels.
        constants: Tensors that layers keep, by name of a placeholder.
        forward: Takes tensors, values of variables and the replica's number.
            Returns the output, its mask, new values and moments, and whatever
            the backward needs.
        backward: Takes the gradient of the output, and all that the forward
            took and made. Returns gradients of the variables.
    """

    specs: list[tf.TensorSpec]
    variables: Sequence[keras.Variable]
    trainable: Sequence[int]
    assigned: Sequence[keras.Variable]
    outputs: Any
    activation: Callable | None
    has_mask: bool
    normalized: Sequence[tuple[keras.layers.BatchNormalization, int]]
    constants: dict[str, tf.Tensor]
    forward: Subgraph
    backward: Subgraph

    def run(self, tensors: Sequence[tf.Tensor]) -> Any:
        """Adds the operations to the graph of a replica."""
        context = tf.distribute.get_replica_context()
        replica = tf.cast(context.replica_id_in_sync_group, tf.int64)
        # Not in the dtype in which a layer would use them.
        reads = [
            tf.convert_to_tensor(attributes.value_of(variable))
            for variable in self.variables
        ]
        averages = [
            batch_norm.MovingAverages.of(layer, count)
            for layer, count in self.normalized
        ]
        # They wait for what the step says, and everything for them.
        given = map(tf.identity, (*tensors, *reads, replica))
        feeds = dict(zip(self.forward.feeds, given))
        capture = tf.compat.v1.get_default_graph().capture
        for name, constant in self.constants.items():
            feeds[name] = capture(constant)
        with symbols.record.stop_recording(), tf.control_dependencies(None):
            output, *others = self.forward.run(feeds)
        found = iter(others)
        mask = next(found) if self.has_mask else None
        for variable in self.assigned:
            variable.assign(next(found))
        moments = [next(found) for _ in self.normalized]
        step_context.current().moments.calls.extend(zip(averages, moments))
        gradient, *saved = self.backward.feeds
        feeds.update(zip(saved, found))

        def backward(upstream):
            with tf.control_dependencies(None):
                return self.backward.run({**feeds, gradient: upstream})

        symbols.record.record_operation(
            "tfscale_call",
            [output],
            [reads[number] for number in self.trainable],
            backward,
        )
        if self.activation is not None:
            output = self.activation(output)
        if mask is not None:
            symbols.set_keras_mask(output, mask)
        return keras.tree.pack_sequence_as(self.outputs, [output])


def _trace(model, call, args, kwargs):
    """The call, or None if it does more than return and assign values."""
    tensors, variables, made = _tensors((args, kwargs)), model.variables, []

    def function(tensors, values, replica):
        given = iter(tensors)
        given_args, given_kwargs = keras.tree.map_structure(
            lambda x: next(given) if tf.is_tensor(x) else x, (args, kwargs)
        )
        pairs = list(zip(variables, values))
        scope = keras.StatelessScope(pairs, collect_losses=True)
        moments = batch_norm.NotedMoments()
        with (
            scope,
            step_context.within(moments=moments),
            step_context.within_ranks(replica=replica),
        ):
            outputs = call(*given_args, **given_kwargs)
        (output,) = keras.tree.flatten(outputs)
        activation = _ACTIVATIONS.get(output.op.type)
        result = output if activation is None else output.op.inputs[0]
        upstream = tf.compat.v1.placeholder(result.dtype, result.shape)
        trainable = [(v, value) for v, value in pairs if v.trainable]
        gradients = tf.gradients(result, [x for _, x in trainable], upstream)
        made[:] = [
            _Made(
                outputs,
                activation,
                result,
                upstream,
                [
                    (variable, tf.convert_to_tensor(gradient))
                    for (variable, _), gradient in zip(trainable, gradients)
                    if gradient is not None
                ],
                [(v, scope.get_current_value(v), old) for v, old in pairs],
                moments.take(),
                scope.losses,
            )
        ]

    specs = [tf.TensorSpec(v.shape, v.dtype) for v in variables]
    with symbols.record.stop_recording():
        graph = (
            tf.function(function, autograph=False)
            .get_concrete_function(
                _specs(tensors), specs, tf.TensorSpec([], tf.int64)
            )
            .graph
        )
    return made[0].traced(graph, _specs(tensors), variables)


@dataclasses.dataclass(frozen=True)
class _Made:
    """Tensors that a call made, in the graph of its trace.

    `states` are variables with their values after and before the call.
    """

    outputs: Any
    activation: Callable | None
    result: tf.Tensor
    upstream: tf.Tensor
    gradients: list[tuple]
    states: list[tuple]
    moments: list[tuple]
    losses: list[tf.Tensor]

    def traced(self, graph, specs, variables) -> _Traced | None:
        """Its operations, optimized."""
        (output,) = keras.tree.flatten(self.outputs)
        mask = symbols.get_keras_mask(output)
        attached = len(instances.attributes_of(output)) - (mask is not None)
        states = [(v, new) for v, new, old in self.states if new is not old]
        if (
            self.losses
            or not all(_is_constant(outside) for outside, _ in graph.captures)
            or (attached and self.activation is None)
            or any(variable.trainable for variable, _ in states)
        ):
            return None
        outside = {inside.op.name: x for x, inside in graph.captures}
        count = len(specs) + len(variables)
        tensors, replica = graph.inputs[:count], graph.inputs[count]
        values = tensors[len(specs) :]
        read = [i for i, x in enumerate(values) if x.consumers()]
        numbers = {id(variables[i]): n for n, i in enumerate(read)}
        early = [
            self.result,
            *([] if mask is None else [mask]),
            *(new for _, new in states),
            *(moments for _, moments in self.moments),
        ]
        feeds = [
            *tensors[: len(specs)],
            *(values[i] for i in read),
            replica,
            self.upstream,
        ]
        given = {x.op for x in (*graph.inputs, self.upstream)}
        subgraph = extract(
            [op for op in graph.get_operations() if op not in given],
            feeds,
            [*early, *(gradient for _, gradient in self.gradients)],
            [],
            graph.as_graph_def(),
        )
        if subgraph.calls_functions:
            return None  # They go with the graph that was traced.
        forward, backward = grappler.optimize(subgraph).divided(len(early))
        return _Traced(
            specs=specs,
            variables=[variables[i] for i in read],
            trainable=[numbers[id(v)] for v, _ in self.gradients],
            assigned=[variable for variable, _ in states],
            outputs=keras.tree.map_structure(lambda _: None, self.outputs),
            activation=self.activation,
            has_mask=mask is not None,
            normalized=[(a.layer, m.shape[1]) for a, m in self.moments],
            constants={
                placeholder: outside[name]
                for placeholder, name in subgraph.captures.items()
            },
            forward=forward,
            backward=backward,
        )


def _is_constant(tensor):
    """Whether it is a tensor outside of the step, and no variable or table."""
    is_of_step = tf.is_symbolic_tensor(tensor)
    return not is_of_step and tensor.dtype != tf.resource


def _tensors(structure):
    return [x for x in keras.tree.flatten(structure) if tf.is_tensor(x)]


def _specs(tensors):
    return [tf.TensorSpec(x.shape, x.dtype) for x in tensors]
