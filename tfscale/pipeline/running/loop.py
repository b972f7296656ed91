"""Runs what a schedule repeats in a loop of TensorFlow's.

    iteration        0                  1                  2
    device 0   ─► B0.0 ─► F0.2 ──► B0.1 ─► F0.3 ──► B0.2 ─► F0.4 ─►
                    ▲        │        ▲        │
                    └─ F0.0  └────────│────────│──► in flight, in registers
    device 1   ─► B1.0 ─► F1.1 ──► B1.1 ─► F1.2 ──► B1.2 ─► F1.3 ─►

Iterations overlap: an action waits for its data and for the action before it on
its device, in whichever iteration that is. The tensors that one iteration
passes to the next are variables of the loop:

* for each device what its last action leaves when it is done;
* states, and sums of gradients;
* what is in flight, one register for each microbatch and key: after an
  iteration, each takes the tensor of the microbatch that comes next;
* arrays of what is read after the loop of every microbatch.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfscale.pipeline.running.array import Array
from tfscale.pipeline.tracing import keys
from tfscale.schedules.steady import Loop
from tfscale.schedules.steady import Users


def run(executor: Any, loop: Loop, makers: Users, readers: Users) -> None:
    """Adds the results to the `Executor` of a replica; see `find_loops`."""
    body = loop.body
    for microbatch, (rank, key) in loop.registers:
        executor.tensors[rank].get(microbatch, key)  # An array may have it.
    for owner in loop.consumed:
        _fill_array(executor, owner, _used(body.unrolled(), readers[owner]))
    made = [
        (owner, action)
        for owner in loop.made
        for action in _used(body.actions, makers[owner])
    ]
    for owner, action in made:
        _make_array(executor, owner, action)
    variables = [
        *_tokens(executor, body),
        *_sums_and_states(executor, body),
        *_registers(executor, loop, makers, readers),
        *_arrays(executor, loop),
    ]
    weights = _weights(executor, body)

    def iterate(time, *values):
        inner = _inside(executor, time * body.period)
        for variable, value in zip(variables, values, strict=True):
            variable.put(inner, value)
        shared = {
            user: dict(zip(names, _unpacked(value, device)))
            for user, (names, value, device) in weights.items()
        }
        for action in body.actions:
            for rank, tensors in enumerate(inner.tensors):
                tensors.shared = shared.get((action.stage, rank), {})
            inner.run([action])
        for (rank, key), action in made:
            tensors = inner.tensors[rank]
            tensors.arrays[key] = tensors.arrays[key].write(
                action.microbatch + tensors.ahead,
                tensors.microbatches[action.microbatch][key],
            )
        updated = [variable.take(inner, body.period) for variable in variables]
        return time + 1, *updated

    _, *values = tf.while_loop(
        lambda time, *_: time < body.repeats,
        iterate,
        [0, *(variable.take(executor, 0) for variable in variables)],
        parallel_iterations=len({*itertools.chain(*executor.devices)}),
    )
    for variable, value in zip(variables, values, strict=True):
        variable.put(executor, value, body.repeats * body.period)


@dataclasses.dataclass(frozen=True)
class _Variable:
    """A variable of the loop: one tensor, or several in one `Optional`.

    Each variable costs the graph ten operations, and the time that TensorFlow
    needs for these.

    Attributes:
        mapping: Gives what holds the tensors while actions are emitted, of an
            executor, and of microbatches so many further than in the first
            iteration.
        names: Their keys there.
        device: Where they are between iterations.
        is_kept: Whether an iteration only hands them on to the next.
    """

    mapping: Callable[[Any, int], Any]
    names: tuple[Any, ...]
    device: str
    is_kept: bool = False

    def take(self, executor, further):
        tensors = self.mapping(executor, further)
        if self.names in tensors:
            return tensors[self.names]
        return _packed([tensors[key] for key in self.names], self.device)

    def put(self, executor, value, further=0):
        tensors = self.mapping(executor, further)
        if self.is_kept and not further:
            tensors[self.names] = value
        else:
            values = _unpacked(value, self.device)
            for key, new in zip(self.names, values, strict=True):
                before = tensors.get(key)
                if isinstance(before, Array):
                    new = dataclasses.replace(before, handle=new)
                tensors[key] = new


def _packed(values, device):
    with tf.device(device):
        if len(values) == 1:
            if isinstance(values[0], Array):
                return values[0].handle
            return tf.identity(values[0])
        return tf.experimental.Optional.from_value(tuple(values))


def _unpacked(value, device):
    if isinstance(value, tf.experimental.Optional):
        with tf.device(device):
            return value.get_value()
    return [value]


def _inside(executor, ahead):
    return dataclasses.replace(
        executor,
        last={},
        tensors=[
            dataclasses.replace(
                tensors,
                states=dict(tensors.states),
                sums=dict(tensors.sums),
                arrays=dict(tensors.arrays),
                microbatches=collections.defaultdict(dict),
                ahead=ahead,
            )
            for tensors in executor.tensors
        ],
    )


def _of_rank(name, rank):
    return lambda executor, _: getattr(executor.tensors[rank], name)


def _weights(executor, body):
    """Sends tensors that all microbatches share once, before the loop."""
    weights = {}
    for stage in sorted({action.stage for action in body.actions}):
        for rank, device in enumerate(executor.devices[stage]):
            shared = executor.tensors[rank].shared
            used = {
                key: shared[key]
                for phase in executor.stages[stage].values()
                for owner, key in phase.inputs
                if owner == rank and key in shared
            }
            if used:
                value = _packed(list(used.values()), device)
                weights[stage, rank] = tuple(used), value, device
    return weights


def _tokens(executor, body):
    """The tensors of each device after its last action."""
    used = {d for a in body.actions for d in executor.devices[a.stage]}
    for device in sorted(used):
        if device not in executor.last:
            with tf.device(device):
                executor.last[device] = tf.zeros(())
        yield _Variable(lambda x, _: x.last, (device,), device)


def _sums_and_states(executor, body):
    """Those that the actions change, on the devices of their stages."""
    found = collections.defaultdict(dict)
    for action in body.actions:
        for rank, key in executor.stages[action.stage][action.kind].outputs:
            if isinstance(key, keys.GradientSum):
                found["sums", rank, action.stage][key] = None
            if isinstance(key, keys.NewState):
                key = keys.State(key.number)
                found["states", rank, action.stage][key] = None
    for (name, rank, stage), changed in found.items():
        device = executor.devices[stage][rank]
        yield _Variable(_of_rank(name, rank), tuple(changed), device)


def _registers(executor, loop, makers, readers):
    """Groups tensors in flight that are made and read together."""
    groups = collections.defaultdict(list)
    for microbatch, (rank, key) in loop.registers:
        making, reading = makers[rank, key], readers[rank, key]
        users = frozenset(making), frozenset(reading)
        groups[rank, microbatch, users].append(key)
    for (rank, microbatch, users), group in groups.items():
        making, reading = ({stage for _, stage in each} for each in users)
        # A tensor that is sent to another stage waits there.
        device = executor.devices[min(making & reading or reading)][rank]
        now = _used(loop.body.actions, frozenset.union(*users), microbatch)

        def mapping(executor, further, rank=rank, microbatch=microbatch):
            return executor.tensors[rank].microbatches[microbatch + further]

        yield _Variable(mapping, tuple(group), device, is_kept=not now)


def _arrays(executor, loop):
    for rank, key in loop.made:
        device = executor.tensors[rank].arrays[key].device
        yield _Variable(_of_rank("arrays", rank), (key,), device)


def _used(actions, users, microbatch=None):
    return [
        action
        for action in actions
        if (action.kind, action.stage) in users
        and microbatch in (None, action.microbatch)
    ]


def _fill_array(executor, owner, actions):
    rank, key = owner
    tensors = executor.tensors[rank]
    values = {
        number: tensors.microbatches[number][key]
        for number in sorted({action.microbatch for action in actions})
        if key in tensors.microbatches[number]
    }
    if values and key not in tensors.arrays:
        like = next(iter(values.values()))
        shape = functools.reduce(
            tf.TensorShape.most_specific_compatible_shape,
            (value.shape for value in values.values()),
        )
        tensors.arrays[key] = Array.of(
            len(tensors.microbatches),
            tf.TensorSpec(shape, like.dtype),
            like.device,
        )
    for number, value in values.items():
        tensors.arrays[key] = tensors.arrays[key].write(number, value)


def _make_array(executor, owner, action):
    rank, key = owner
    tensors = executor.tensors[rank]
    if key not in tensors.arrays:
        phase = executor.stages[action.stage][action.kind]
        made = dict(zip(phase.outputs, phase.function.outputs))
        if isinstance(key, keys.StateBefore):
            like = tensors.states[keys.State(key.number)]
        else:
            like = made[owner]
        tensors.arrays[key] = Array.of(
            len(tensors.microbatches),
            like,
            executor.devices[action.stage][rank],
        )
