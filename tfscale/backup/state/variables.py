"""All variables of a run: their values are held, and restored.

These are `model.variables`, those of the optimizer and metrics, and variables
and generators of TensorFlow that are attributes of layers, which nothing lists.
A key is an index in the order in which a program creates them, because names
depend on earlier variables. Variables of losses, metrics, nested containers and
plain objects may be created later; the path to them is their key. The key of a
variable that only the traced step leads to is its name.
"""

import dataclasses
import logging
import random
import types
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale._internals import attributes
from tfscale._internals import instances
from tfscale.backup.files.committed import Backup
from tfscale.backup.files.tensor_shards import TensorShard
from tfscale.backup.files.tensor_shards import slice_of
from tfscale.backup.state import random_states
from tfscale.backup.state import traced_step
from tfscale.backup.state.traced_step import captured_variables
from tfscale.variables.of_variable import sharding_of
from tfscale.variables.sharding import Sharding

HELD = "held"
_GENERATORS = (tf.random.Generator, keras.random.SeedGenerator)
_OF_TENSORFLOW = (tf.Variable, tf.Module)
_OF_PYTHON = (
    *(np.random.Generator, np.random.RandomState, random.Random),
    types.GeneratorType,
)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A variable of a run, with its key (see the module)."""

    key: str
    name: str  # for messages
    variable: Any  # of Keras or TensorFlow
    # Whether its value is the sum over the replicas, as for metrics; otherwise
    # that of the first replica.
    is_sum: bool

    @property
    def components(self) -> list[tf.Variable]:
        """A variable of TensorFlow for each device."""
        value = self._value
        if isinstance(value, tf.distribute.DistributedValues):
            return list(value.values)
        return [value]

    @property
    def sharding(self) -> Sharding:
        """How the variable is sharded."""
        return sharding_of(self.variable)

    @property
    def num_ranks(self) -> int:
        """The number of components of one replica."""
        strategy = getattr(self._value, "distribute_strategy", None)
        return getattr(
            getattr(strategy, "extended", None), "num_model_ranks", 1
        )

    def by_replica(self, worker: int) -> Iterator[tuple[int, int, tf.Variable]]:
        """Replica, counted over all workers, rank and component of each."""
        components = self.components
        first = worker * len(components) // self.num_ranks
        for index, component in enumerate(components):
            replica, rank = divmod(index, self.num_ranks)
            yield first + replica, rank, component

    @property
    def _value(self):
        if isinstance(self.variable, keras.Variable):
            return attributes.value_of(self.variable)
        return self.variable


def variables_of(model: keras.Model) -> list[Entry]:
    """All variables of a built model and of what it was compiled with."""
    entries, seen = [], set()

    def add(kind, variables, is_sum=False):
        begin = len(entries)
        for variable in variables:
            if id(variable) in seen:
                continue
            seen.add(id(variable))
            if isinstance(variable, keras.Variable):
                seen.add(id(attributes.value_of(variable)))
            name = getattr(variable, "path", None) or variable.name
            key = f"{kind}/{len(entries) - begin}"
            # A metric may have other variables, by `aggregation`.
            adds_up = is_sum and variable.aggregation == "sum"
            entries.append(Entry(key, name, variable, adds_up))

    add("model", model.variables)
    if model.optimizer is not None:
        add("optimizer", model.optimizer.variables)
    add("metrics", model.metrics_variables, is_sum=True)
    # Of attributes of layers, which Keras does not list.
    held = [
        value
        for layer in attributes.flatten_layers(model)
        for value in instances.held_by(layer)
        if isinstance(value, (tf.random.Generator, *_OF_TENSORFLOW))
    ]
    add("tensorflow", [v for value in held for v in _variables_in(value)])
    for path, value in instances.reachable(model, _is_state):
        for number, variable in enumerate(_variables_in(value)):
            if id(variable) in seen:
                continue
            seen.add(id(variable))
            key = f"{HELD}/{path}" + (f"/{number}" if number else "")
            entries.append(Entry(key, path, variable, False))
    handles = _handles(entries)
    for path, variable in captured_variables(model.train_function, handles):
        entries.append(Entry(f"{HELD}/{path}", path, variable, False))
    return entries


def warn_of_unsaved_in_validation(model: keras.Model) -> None:
    """Names state that only the step of a validation leads to."""
    traced_step.warn_of_unsaved(model, model.test_function)
    known = _handles(variables_of(model))
    traced_step.warn_of_unsaved_variables(model, known)


def _handles(entries):
    """The ids of the handles of all that is saved."""
    found = {id(each.handle) for e in entries for each in e.components}
    return found.union(map(id, random_states.handles()))


def _is_state(value):
    return isinstance(value, (keras.Variable, *_GENERATORS, *_OF_TENSORFLOW))


def _variables_in(value):
    if isinstance(value, _GENERATORS):
        return [value.state]
    return value.variables if isinstance(value, tf.Module) else [value]


def left_out(model: keras.Model) -> list[str]:
    """Paths of Python's generators in a model, which cannot be saved."""
    found = instances.reachable(model, lambda v: isinstance(v, _OF_PYTHON))
    return [f"{path} ({type(value).__name__})" for path, value in found]


def hold(entries: list[Entry], worker: int = 0) -> list[TensorShard]:
    """The values of variables now; worker 0 has those in common.

    Nothing is copied: TensorFlow copies a held value when it is updated.
    """
    shards = []
    for entry in entries:
        sharding, components = entry.sharding, entry.components
        if sharding.is_sharded:
            distinct: dict[str, Any] = {}
            for shard in zip(sharding.coordinates, components):
                distinct.setdefault(slice_of(sharding, shard[0]), shard)
            shards += [
                TensorShard(entry.key, sharding, replica_and_rank, _value(one))
                for replica_and_rank, one in distinct.values()
                if not worker
            ]
            continue
        # Training updates all replicas alike. Statistics, seeds and metrics are
        # small, and each replica may have its own: a metric counts its batches.
        is_updated = entry.key.startswith("optimizer") or (
            isinstance(entry.variable, keras.Variable)
            and entry.variable.trainable
        )
        for replica, rank, component in entry.by_replica(worker):
            is_copy = rank > 0 and entry.is_sum
            if is_updated:
                is_copy = bool(worker or replica or rank)
            if not is_copy:
                key = _key(entry, replica, rank)
                whole = Sharding(tuple(component.shape), component.dtype.size)
                value = _value(component)
                shards.append(TensorShard(key, whole, (0, 0), value))
    return shards


def _key(entry, replica, rank=0):
    """The name of the value of a replica and rank, if not sharded."""
    if not replica and not rank:
        return entry.key
    return f"{entry.key}@{replica}" + (f".{rank}" if rank else "")


def _value(component):
    with tf.device(component.device):
        return component.read_value()


def difference(entries: list[Entry], backup: Backup) -> str | None:
    """The difference between these variables and those of a backup, or None."""
    expected = {
        entry.key: (
            entry.name,
            list(entry.sharding.shape),
            tf.as_dtype(entry.variable.dtype).name,
        )
        for entry in entries
    }
    found = {
        key: (value["shape"], value["dtype"])
        for key, value in backup.tensors.items()
        if "@" not in key and key.split("/")[0] in _KINDS
    }
    for key, (name, shape, dtype) in expected.items():
        if key not in found and not key.startswith(HELD):
            return f"{name!r} {shape} {dtype}, which the backup has not"
        if found.get(key, (shape, dtype)) != (shape, dtype):
            before = f"{found[key][0]} {found[key][1]}"
            return f"{name!r} {shape} {dtype}, in the backup {before}"
    for key, (shape, dtype) in found.items():
        if key not in expected and not key.startswith(HELD):
            return f"no {key!r} {shape} {dtype}, which the backup has"
    return None


# The first step may create variables that are held.
_KINDS = ("model", "optimizer", "metrics", "tensorflow", HELD)


def not_created(entries: list[Entry], backup: Backup) -> list[str]:
    """Keys of a backup whose variables do not exist before the first step."""
    keys = {entry.key for entry in entries}
    held = [key for key in backup.tensors if key.startswith(HELD)]
    return [key for key in held if "@" not in key and key not in keys]


def restore(
    entries: list[Entry], backup: Backup, worker: int = 0, count: int = 1
) -> None:
    """Gives variables the values of a backup, shard by shard."""
    for entry in entries:
        sharding, components = entry.sharding, entry.components
        if entry.key not in backup.tensors and entry.key.startswith(HELD):
            logging.warning("%r is not in the backup.", entry.name)
            continue
        if sharding.is_sharded:
            for coordinates, component in zip(sharding.coordinates, components):
                value = backup.read(entry.key, sharding, coordinates)
                _assign(component, value)
            continue
        values = _values(entry, backup, count * len(components))
        for replica, rank, component in entry.by_replica(worker):
            _assign(component, values(replica, rank))


def _values(entry, backup, num_devices):
    """A function from replica and rank to the value of a whole variable."""
    before = 1
    while _key(entry, before) in backup.tensors:
        before += 1
    now = num_devices // entry.num_ranks
    if entry.is_sum and before != now:
        # Over replicas: ranks have copies of one sum.
        total = tf.add_n(
            [backup.read_whole(_key(entry, i)) for i in range(before)]
        )
        return lambda replica, rank: tf.zeros_like(total) if replica else total

    def value(replica, rank):
        replica = replica if before == now else 0
        key = _key(entry, replica, rank)
        if key not in backup.tensors:  # of another number of ranks
            key = _key(entry, replica)
        return backup.read_whole(key)

    return value


def _assign(component, value):
    with tf.device(component.device):
        component.assign(value)
