"""Operations of a graph, cut out as a separate function."""

import collections
import dataclasses
from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence

import tensorflow as tf

from tfscale._internals import attributes
from tfscale.graphs import walks

# They call a Python function, which exists in one process only.
_OF_PYTHON = ("EagerPyFunc", "PyFunc", "PyFuncStateless")


@dataclasses.dataclass(frozen=True)
class Subgraph:
    """Operations with placeholders for the tensors of other operations.

    Attributes:
        graph_def: Operations, placeholders, and an identity for each result.
        feeds: Names of the placeholders of inputs.
        captures: By name of a placeholder, that of the placeholder in the
            original graph for a tensor from outside it.
        fetches: Names of the identities.
        keep: Names of operations that run for their side effects.
    """

    graph_def: tf.compat.v1.GraphDef
    feeds: tuple[str, ...]
    captures: Mapping[str, str]
    fetches: tuple[str, ...]
    keep: tuple[str, ...]

    @property
    def calls_functions(self) -> bool:
        """Whether it calls functions, which its first graph keeps alive."""
        return bool(self.graph_def.library.function) or any(
            node.op in _OF_PYTHON for node in self.graph_def.node
        )

    def divided(self, num_first: int) -> "tuple[Subgraph, Subgraph]":
        """All that does not depend on the last feed, and all that does.

        The first has the first fetches, and then whatever the second needs of
        it. The second takes the last feed, and these.
        """
        *_, last = self.feeds
        users = collections.defaultdict(list)
        for node in self.graph_def.node:
            for source in node.input:
                users[_node_of(source)].append(node.name)
        late = walks.reachable([last], lambda name: users[name])
        placeholders = {*self.feeds, *self.captures}
        first, second = (
            tf.compat.v1.GraphDef(
                library=self.graph_def.library, versions=self.graph_def.versions
            )
            for _ in range(2)
        )
        saved: dict[str, str] = {}
        for node in self.graph_def.node:
            if node.name not in late:
                first.node.append(node)
                continue
            second.node.append(node)
            inputs = []
            for source in node.input:
                name = _node_of(source)
                if name in late or name in placeholders:
                    inputs.append(source)
                elif not source.startswith("^"):
                    new = f"saved_{len(saved)}"
                    inputs.append(saved.setdefault(source, new))
            second.node[-1].input[:] = inputs
        return (
            dataclasses.replace(
                self,
                graph_def=first,
                fetches=(*self.fetches[:num_first], *saved),
            ),
            dataclasses.replace(
                self,
                graph_def=second,
                feeds=(last, *saved.values()),
                fetches=self.fetches[num_first:],
            ),
        )

    def run(
        self,
        tensors: Mapping[str, tf.Tensor],
        devices: Mapping[str, str] | None = None,
    ) -> list[tf.Tensor]:
        """Adds the operations to the current graph; returns those of `fetches`.

        `tensors` replace placeholders, by name; `devices` replace those of the
        trace.
        """
        graph_def = tf.compat.v1.GraphDef(
            library=self.graph_def.library, versions=self.graph_def.versions
        )
        returned = self._returned()
        used = set()
        for node in self.graph_def.node:
            # Nodes that only return their input are left out.
            if node.name not in tensors and returned.get(node.name) is None:
                # Tensors given are ready: no operation waits for them.
                inputs = [
                    source
                    for source in node.input
                    if not (source[0] == "^" and source[1:] in tensors)
                ]
                used.update(map(_node_of, inputs))
                graph_def.node.add(
                    name=node.name,
                    op=node.op,
                    attr=node.attr,
                    input=inputs,
                    device=_device(node, devices or {}),
                )
        return tf.graph_util.import_graph_def(
            graph_def,
            input_map={
                f"{name}:0": x for name, x in tensors.items() if name in used
            },
            return_elements=[
                returned.get(name) or (name if ":" in name else f"{name}:0")
                for name in self.fetches
            ],
            name="",
        )

    def _returned(self) -> dict[str, str | None]:
        """For fetches that only the caller needs, the tensors that they return.

        In a step they would stand once per microbatch: a tenth of the graph.
        """
        placeholders = {*self.feeds, *self.captures}
        nodes = self.graph_def.node
        used = {_node_of(source) for node in nodes for source in node.input}
        returned: dict[str, str | None] = {}
        for node in nodes:
            if (
                node.name in self.fetches
                and node.name not in used
                and node.op == "Identity"
                and len(node.input) == 1
            ):
                source, _, index = node.input[0].partition(":")
                if source not in placeholders:
                    returned[node.name] = f"{source}:{index or 0}"
        return returned


def extract(
    operations: Collection[tf.Operation],
    feeds: Sequence[tf.Tensor],
    fetches: Sequence[tf.Tensor],
    side_effects: Sequence[tf.Operation],
    original: tf.compat.v1.GraphDef,
) -> Subgraph:
    """Cuts operations out of their graph.

    Control dependencies on other operations are dropped. `feeds` come from
    other operations; `side_effects` are operations that have to run.
    """
    graph_def = tf.compat.v1.GraphDef(
        library=original.library, versions=original.versions
    )
    names, captures = {}, {}

    def placeholder(tensor, kind):
        name = names[tensor.ref()] = f"{kind}_{len(names)}"
        shape = tf.compat.v1.AttrValue(shape=tensor.shape.as_proto())
        graph_def.node.add(
            name=name,
            op="Placeholder",
            attr={"dtype": _type(tensor), "shape": shape},
        )
        return name

    def source(tensor):
        """The name of an input; constants and captures come along."""
        if tensor.ref() not in names:
            if tensor.op.type == "Placeholder":
                captures[placeholder(tensor, "capture")] = tensor.op.name
            else:
                # Grappler needs this form: `name:0` would be another node.
                names[tensor.ref()] = tensor.name.removesuffix(":0")
                if tensor.op not in operations:
                    add(tensor.op)
        return names[tensor.ref()]

    def add(operation):
        node = operation.node_def
        # Devices are known; the others of a group may be elsewhere.
        node.attr.pop(attributes.COLOCATED_WITH, None)
        node.input[:] = [source(tensor) for tensor in operation.inputs]
        node.input.extend(
            f"^{other.name}"
            for other in operation.control_inputs
            if other in operations
        )
        graph_def.node.append(node)

    placeholders = tuple(placeholder(tensor, "feed") for tensor in feeds)
    for operation in operations:
        add(operation)
    returned = tuple(f"fetch_{number}" for number in range(len(fetches)))
    for name, tensor in zip(returned, fetches):
        # Adds its operation before it, if it is a constant.
        given, attr = source(tensor), {"T": _type(tensor)}
        graph_def.node.add(name=name, op="Identity", input=[given], attr=attr)
    keep = tuple(operation.name for operation in side_effects)
    return Subgraph(graph_def, placeholders, captures, returned, keep)


def _node_of(source):
    return source.lstrip("^").split(":")[0]


def _device(node, devices):
    """The device of an operation, or none for the device of its stage."""
    if node.op in _OF_PYTHON:
        # TensorFlow names the process of the function with or without stages.
        return f"{node.device}/device:CPU:0"
    return devices.get(node.device, "")


def _type(tensor):
    return tf.compat.v1.AttrValue(type=tensor.dtype.as_datatype_enum)
