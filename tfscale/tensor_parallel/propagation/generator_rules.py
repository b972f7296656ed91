"""Which generators of random numbers draw for sharded tensors, and only so.

A rank puts its number into the seeds of a generator, or it does not: one that
draws for parts and for wholes has to draw for wholes only. So do a seed that
is a constant and a generator that is not the model's own.
"""

from collections.abc import Iterable
from collections.abc import Mapping

import tensorflow as tf

from tfscale.graphs import walks
from tfscale.tensor_parallel.propagation import shape_rules
from tfscale.tensor_parallel.propagation.placements import Sharded


def sharded_generators(
    operations: Iterable[tf.Operation],
    states: Mapping,
    generators: Iterable[tf.Tensor],
) -> tuple[frozenset, dict]:
    """Sorts generators by what they draw for.

    Args:
        operations: Those of a model that are looked at.
        states: How tensors differ between ranks, see `Walk.states`.
        generators: The states of the model's generators.

    Returns:
        Names of those that draw for sharded tensors, and for each source that
        has to be gathered, because what is drawn for it is drawn for a whole
        too, why.
    """
    known = {tensor.name for tensor in generators}
    parts, wholes = {}, set()
    for op in operations:
        if op.type not in shape_rules.RANDOM or len(op.inputs) == 1:
            # What keeps its own state differs on each rank anyway.
            continue
        origins = _origins(list(op.inputs)[1:])
        state, keys = states.get(op.outputs[0].name, (None, frozenset()))
        if isinstance(state, Sharded):
            parts[op.name] = origins, keys
        else:
            wholes |= origins
    failures = {}
    for name, (origins, keys) in parts.items():
        reason = None
        if not origins or not origins <= known:
            reason = f"{name!r} draws with a seed that is not of a generator"
        elif origins & wholes:
            reason = f"the generator of {name!r} draws for a whole tensor too"
        if reason:
            failures.update(dict.fromkeys(keys, reason))
    found = (origins for origins, _ in parts.values())
    return frozenset().union(*found), failures


def _origins(tensors):
    """Names of the placeholders that tensors are made from."""
    operations = walks.ancestors([tensor.op for tensor in tensors])
    return {op.outputs[0].name for op in operations if op.type == "Placeholder"}
