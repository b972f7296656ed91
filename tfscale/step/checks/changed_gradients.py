"""Finds what a `train_step` does to gradients between tape and optimizer.

Gradients of a tape are local: of the rows of a replica or microbatch, and of a
model rank's shard of a variable. Code that changes them is found in the graph,
between the operations of the tape and the arguments of `apply`:

    gradient_tape/MatMul ──── L2Loss ─ Sqrt ─┐
                         └─── Mul ───────────┴─ ...    a norm of a part

Linear operations are right for sums over replicas, elementwise ones for shards.
The results of `tfscale.sum_gradients` are whole.
"""

import contextlib
import re
import warnings
import weakref
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.step import batch_shard
from tfscale.variables.of_variable import sharding_of

_BACKWARD = re.compile(r"(^|/)(gradient_tape|gradients)/")
# Operations that are linear in all inputs, or in each one of two.
_LINEAR = {
    *("AddN", "AddV2", "BroadcastTo", "Cast", "CheckNumerics", "ConcatV2"),
    *("EnsureShape", "ExpandDims", "Identity", "IdentityN", "Mean", "Neg"),
    *("Pack", "Reshape", "Slice", "Split", "SplitV", "Squeeze"),
    *("StopGradient", "StridedSlice", "Sub", "Sum", "Tile", "Transpose"),
    *("Unpack", "UnsortedSegmentSum"),
}
_SUMS = {"AddN", "AddV2", "Sub"}
_PRODUCTS = {"BatchMatMulV2", "Einsum", "MatMul", "Mul", "MulNoNan"}
_QUOTIENTS = {"DivNoNan", "RealDiv"}
_MIXES_ELEMENTS = _PRODUCTS - {"Mul", "MulNoNan"} | {"Cumsum", "Softmax"}

# In the names of sums.
_SUM = "tfscale_summed_gradient"
# The names of the last operations of tapes whose gradients are local, by graph.
# Tensors would keep it alive.
_local: weakref.WeakKeyDictionary[tf.Graph, set[str]] = (
    weakref.WeakKeyDictionary()
)


def as_sum(gradient: tf.Tensor) -> tf.Tensor:
    """The same gradient, marked as whole."""
    return tf.identity(gradient, name=_SUM)


class Origin:
    """The origin of a gradient in the graph; unknown for an eager tensor.

    Attributes:
        is_sum: Whether it is computed from a result of `as_sum`.
        is_of_tape: Whether it is computed from a result of a tape.
        is_local: Whether it is computed from gradients given to
            `warn_of_changed`.
    """

    def __init__(self, gradient: tf.Tensor | tf.IndexedSlices | None):
        self.is_sum = self.is_of_tape = self.is_local = False
        # In order, each after its inputs; and those computed from a tape.
        self._operations: list[tf.Operation] = []
        self._of_tape: set[tf.Operation] = set()
        self._ends: list[tf.Operation] = []
        if isinstance(gradient, tf.IndexedSlices):
            gradient = gradient.values
        if gradient is not None and tf.is_symbolic_tensor(gradient):
            self._walk(gradient.op)

    def _walk(self, last):
        local = _local.get(last.graph, set())
        seen, stack = set(), [(last, False)]
        while stack:
            op, is_done = stack.pop()
            if is_done:
                self._operations.append(op)
                if any(x.op in self._of_tape for x in op.inputs):
                    self._of_tape.add(op)
            elif op in seen:
                continue
            elif _SUM in op.name:
                self.is_sum = True
            elif _is_of_tape(op):
                self.is_of_tape = True
                self.is_local |= op.name in local
                self._ends.append(op)
                self._of_tape.add(op)
            else:
                stack.append((op, True))
                # Shapes and indices are not followed.
                stack += [
                    (x.op, False) for x in op.inputs if x.dtype.is_floating
                ]
            seen.add(op)

    def mark_local(self) -> None:
        """Marks it as the gradient of some rows, or of a shard."""
        for op in self._ends:
            _local.setdefault(op.graph, set()).add(op.name)

    def change(self, of_shards: bool, of_rows: bool) -> tf.Operation | None:
        """An operation that is wrong for local gradients, or None."""
        for op in self._operations:
            of_tape = [x for x in op.inputs if x.op in self._of_tape]
            if of_tape and (
                (of_rows and not _is_linear(op, len(of_tape)))
                or (of_shards and not _is_elementwise(op, of_tape))
            ):
                return op
        return None


def _is_of_tape(op):
    """Whether a tape created it, by its name or by the function it calls."""
    if _BACKWARD.search(op.name):
        return True
    is_call = op.type in ("PartitionedCall", "StatefulPartitionedCall")
    return is_call and "__backward_" in op.get_attr("f").name


def _is_linear(op, num_of_tape):
    """Whether it is linear in its inputs that come from a tape."""
    if op.type in _SUMS:
        # A tensor added on each replica would count more than once.
        return num_of_tape == len(op.inputs)
    if op.type in _QUOTIENTS:
        return num_of_tape == 1
    return op.type in _LINEAR or (op.type in _PRODUCTS and num_of_tape == 1)


def _is_elementwise(op, of_tape):
    if op.type == "UnsortedSegmentSum":
        return True  # rows of a lookup, made dense
    first, *others = (x.shape for x in [*of_tape, *op.outputs])
    # Of a tied table, say, not all dims are known.
    return (
        op.type not in _MIXES_ELEMENTS
        and first.rank
        and all(x.rank and x.is_compatible_with(first) for x in others)
    )


@contextlib.contextmanager
def explained(variables: Iterable[keras.Variable]) -> Iterator[None]:
    """Within it, an error of mixing shards with whole tensors is explained."""
    try:
        yield
    except ValueError as error:
        sharded = [
            v.path for v in variables if sharding_of(v).model_dim is not None
        ]
        graph = tf.compat.v1.get_default_graph()
        if (
            not sharded
            or not re.search("[Dd]imension|[Ss]hape", str(error))
            or not any(_BACKWARD.search(x.name) for x in graph.get_operations())
        ):
            raise
        raise ValueError(
            "Gradients of variables that model ranks divide are shards, and "
            "what a `train_step` adds to them or assigns must be of the same "
            f"shape. Received: gradients of {', '.join(sharded[:3])}, and an "
            "operation after the tape that failed. Put them together before: "
            "`gradients = tfscale.sum_gradients(gradients, variables)`, which "
            f"`optimizer.apply` takes as they are. It failed by: {error}"
        ) from error


def origins_of(
    gradients: Sequence[Any],
    variables: Sequence[keras.Variable],
    has_several_replicas: bool,
) -> tuple[list[Origin], list[Any]]:
    """The origin of each gradient, and the gradient, or None if already summed.

    Warns if others were changed by hand; raises a ValueError if sums were added
    to gradients that were not summed.
    """
    origins = [Origin(gradient) for gradient in gradients]
    unsummed = [None if o.is_sum else g for o, g in zip(origins, gradients)]
    batch_shard.warn_of_undivided()
    for origin, variable in zip(origins, variables):
        if origin.is_sum and origin.is_of_tape:
            raise ValueError(
                "All that a gradient is made of must be summed. Received: for "
                f"{variable.path!r} one that is made of what "
                "`tfscale.sum_gradients` has returned and of what it was not "
                "given. Give it all gradients of the tape first."
            )
    warn_of_changed(
        origins,
        any(sharding_of(v).model_dim is not None for v in variables),
        "a replica" if has_several_replicas else "",
        "Sum them before, `tfscale.sum_gradients(gradients, variables)`, or "
        "clip by `clipnorm` or `global_clipnorm` of the optimizer.",
    )
    return origins, unsummed


def warn_of_logged(logs: Any, whose: str, advice: str) -> None:
    """Warns if a `train_step` logs a value computed from local gradients.

    `whose` is "a replica", say; `advice` says what to do.
    """
    for path, value in keras.tree.flatten_with_path(logs):
        if tf.is_symbolic_tensor(value) and Origin(value).is_local:
            warnings.warn(
                "Gradients that a `train_step` logs, or their norm, must be "
                f"whole. Received: {'/'.join(map(str, path))!r}, made of "
                f"gradients of {whose}. {advice}",
                stacklevel=2,
            )
            return


def warn_of_changed(
    origins: Sequence[Origin], of_shards: bool, of_rows: str, advice: str
) -> None:
    """Warns if local gradients were changed as only whole ones can be.

    `of_rows` is "a replica", say, or empty for all rows; `advice` says what to
    do.
    """
    if of_rows or of_shards:
        for origin in origins:
            origin.mark_local()
    for origin in origins:
        change = origin.change(of_shards, bool(of_rows))
        if change is None:
            continue
        whose = [f"of the rows of {of_rows}"] * bool(of_rows)
        whose += ["of a model rank's shards of variables"] * of_shards
        warnings.warn(
            "Gradients that a `train_step` changes by hand must be whole. "
            f"Received: gradients {' and '.join(whose)}, changed by "
            f"{change.type} between the tape and the optimizer. {advice}",
            stacklevel=2,
        )
        return
