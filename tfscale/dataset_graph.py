"""A dataset's own graph: the chain of its transformations, for who reads it.

tf.data writes any dataset as a GraphDef (`DatasetToGraphV2`) and makes one of a
GraphDef (`DatasetFromGraph`). Between the two a prefix can be cut off, which is
a copy: it has variables and tables of its own.
"""

import dataclasses

import tensorflow as tf

from tfscale._internals import datasets
from tfscale.graphs import random_operations

# What moves a seed that a variable holds, as Keras' random layers do.
_SEED_MOVES = ("AssignAddVariableOp", "AssignVariableOp")
_PYTHON = ("EagerPyFunc", "PyFunc")


@dataclasses.dataclass(frozen=True)
class DatasetStage:
    """One transformation of a chain.

    Attributes:
        node: Name of its node in the graph.
        op: Its operation, such as `"ParallelMapDatasetV2"`.
        ops: Frozen set of the operations in the functions that it calls.
    """

    node: str
    op: str
    ops: frozenset[str]

    def is_a(self, *kinds):
        """Whether it is one of the kinds, whatever their version."""
        return any(self.op.startswith(f"{kind}Dataset") for kind in kinds)

    @property
    def seeded_random(self):
        """Operations in it that draw from a seed they are given, sorted."""
        return sorted(filter(random_operations.draws_from_seed, self.ops))

    @property
    def stateful_random(self):
        """Operations in it that draw from hidden state, sorted."""
        drawn = list(filter(random_operations.draws_from_state, self.ops))
        if self.seeded_random:
            drawn.extend(op for op in self.ops if op in _SEED_MOVES)
        return sorted(drawn)

    @property
    def random(self):
        """Operations in it that draw random numbers, sorted."""
        return self.stateful_random + self.seeded_random

    @property
    def python(self):
        """Operations in it that call Python, sorted."""
        return sorted(op for op in self.ops if op.startswith(_PYTHON))


class DatasetGraph:
    """The graph of a dataset."""

    def __init__(self, dataset):
        serialized = tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            external_state_policy=1,  # state is copied, silently
        )
        self.graph = tf.compat.v1.GraphDef.FromString(serialized.numpy())
        self._functions = {
            function.signature.name: function
            for function in self.graph.library.function
        }

    def nodes(self):
        """Dict from name to node."""
        return {node.name: node for node in self.graph.node}

    def stages(self):
        """The chain from its source on, as a list of `DatasetStage`.

        A transformation of several datasets, such as `zip`, counts as a
        source.
        """
        chain, stage = [], self._last()
        while True:
            chain.append(stage)
            inputs = self.inputs(stage)
            if len(inputs) != 1:
                return chain[::-1]
            stage = inputs[0]

    def all_stages(self):
        """Every stage, also of the branches of a `zip`; inputs come first."""
        found, todo = {}, [(self._last(), False)]
        while todo:
            stage, inputs_are_found = todo.pop()
            if inputs_are_found:
                found.setdefault(stage.node, stage)
            elif stage.node not in found:
                todo.append((stage, True))
                todo.extend((one, False) for one in self.inputs(stage))
        return list(found.values())

    def inputs(self, stage):
        """The datasets that a stage transforms, as a list of `DatasetStage`."""
        nodes = self.nodes()
        names = [_plain(name) for name in nodes[stage.node].input]
        return [
            self._stage(nodes[name]) for name in names if _is_stage(nodes[name])
        ]

    def _last(self):
        nodes = self.nodes()
        name = next(n.input[0] for n in self.graph.node if n.op == "_Retval")
        return self._stage(nodes[_plain(name)])

    def _stage(self, node):
        return DatasetStage(node.name, node.op, self._ops_of(node))

    def _ops_of(self, node):
        ops, todo = set(), [node]
        seen = set()
        while todo:
            node = todo.pop()
            for attr in node.attr.values():
                for name in [attr.func.name, *(f.name for f in attr.list.func)]:
                    function = self._functions.get(name)
                    if function is not None and name not in seen:
                        seen.add(name)
                        todo.extend(function.node_def)
                        ops.update(
                            n.op
                            for n in function.node_def
                            if not datasets.is_asked(n)
                        )
        return frozenset(ops)

    def constant(self, stage, position):
        """The value of a constant input of a stage, or None."""
        nodes = self.nodes()
        node = nodes[_plain(nodes[stage.node].input[position])]
        if node.op != "Const":
            return None
        return tf.make_ndarray(node.attr["value"].tensor).item()

    def integers(self, stage):
        """The inputs of a stage that are an integer constant, as a list."""
        nodes = self.nodes()
        tensors = [
            node.attr["value"].tensor
            for name in nodes[stage.node].input
            if (node := nodes[_plain(name)]).op == "Const"
        ]
        return [
            tf.make_ndarray(tensor).item()
            for tensor in tensors
            if tensor.dtype == tf.int64.as_datatype_enum
            and not tensor.tensor_shape.dim
        ]

    def attribute(self, stage, name):
        """The value of a boolean attribute of a stage; False without it."""
        return self.nodes()[stage.node].attr[name].b

    def dataset(self, stage=None):
        """A dataset of the graph up to a stage."""
        stage = stage or self.stages()[-1]
        graph = tf.compat.v1.GraphDef()
        graph.CopyFrom(self.graph)
        end = next(node for node in graph.node if node.op == "_Retval")
        end.input[0] = stage.node
        node = self.nodes()[stage.node]
        variant = tf.raw_ops.DatasetFromGraph(
            graph_def=graph.SerializeToString()
        )
        return tf.data.experimental.from_variant(variant, _spec(node))


def _plain(name):
    return name.removeprefix("^").split(":")[0]


def _is_stage(node):
    return "Dataset" in node.op


def _spec(node):
    types = node.attr["output_types"].list.type
    types = types or node.attr["Toutput_types"].list.type
    shapes = node.attr["output_shapes"].list.shape
    return tuple(
        tf.TensorSpec(tf.TensorShape(shape), tf.as_dtype(dtype))
        for shape, dtype in zip(shapes, types)
    )
