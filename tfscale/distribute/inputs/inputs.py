"""How replicas get their batches: on CPUs, from where tf.data makes them."""

import functools
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale import _internals
from tfscale import in_place
from tfscale.distribute.inputs.generator_inputs import copied
from tfscale.distribute.inputs.generator_inputs import unread
from tfscale.distribute.inputs.in_turn import ordinary_iterator
from tfscale.distribute.inputs.in_turn import taken_in_turn
from tfscale.distribute.inputs.placed_inputs import placed
from tfscale.distribute.inputs.placed_inputs import source_of


class MirroredInputs(_internals.MirroredExtended):
    """The `extended` of a `MirroredStrategy`, which leaves CPUs their batches.

    TensorFlow's datasets for several devices fetch batches ahead to each. For
    CPUs there is nothing to fetch ahead to, and it costs. Devices of other
    machines would fetch by calls back to this one: they get what the step
    sends them.
    """

    @property
    def _fetches_ahead(self):
        host = self._input_workers_devices[0][0].rpartition("/")[0]
        return not self._is_on_cpu and all(
            device.startswith(host) for device in self._devices
        )

    @property
    def _is_on_cpu(self):
        return all("CPU" in device for device in self._devices)

    def _input_workers_with_options(self, options=None):
        if options is None and not self._fetches_ahead:
            # Batches are where they are used. Each iterator more that is let
            # go of may hold up `fit`, because tf.data's autotuner may sleep
            # through the end of it.
            options = tf.distribute.InputOptions(
                experimental_fetch_to_device=False
            )
        return super()._input_workers_with_options(options)

    def _experimental_distribute_dataset(self, dataset, options):
        distribute = functools.partial(self._distributed, options=options)
        distributed = unread(distribute(dataset), distribute)
        in_place.put(distributed, _NotEmpty)
        return distributed

    def _distributed(self, dataset, options):
        if options or not self._is_on_cpu:
            distributed = super()._experimental_distribute_dataset(
                source_of(copied(dataset)), options
            )
            return placed(distributed, dataset)
        is_read_ahead = self._num_replicas_in_sync > 1
        distributed = self._made(
            _internals.get_distributed_dataset,
            source_of(copied(dataset)) if is_read_ahead else dataset,
            options,
            num_replicas_in_sync=self._num_replicas_in_sync,
        )
        return placed(distributed, dataset) if is_read_ahead else distributed

    def _distribute_datasets_from_function(self, dataset_fn, options):
        count = self._num_replicas_in_sync
        context = tf.distribute.InputContext(num_replicas_in_sync=count)
        distributed = self._made(
            _internals.get_distributed_datasets_from_function,
            dataset_fn,
            options,
            input_contexts=[context],
        )
        return counted_in_steps(distributed, count)

    def _made(self, get, data, options, **kwargs):
        is_in_turn = self._is_on_cpu and not options
        distributed = get(
            data,
            self._input_workers_with_options(options),
            strategy=self._container_strategy(),
            options=ordinary_iterator() if is_in_turn else options,
            **kwargs,
        )
        return taken_in_turn(distributed) if is_in_turn else distributed

    def _reduce_to(self, reduce_op, value, destinations, options):
        """Keras asks for the mean of a batch to learn what it looks like.

        Even if it has none: then a replica's part has to do.
        """

        def reduce(value):
            if (
                reduce_op == tf.distribute.ReduceOp.MEAN
                and isinstance(value, tf.distribute.DistributedValues)
                and not _has_mean(self._local_results(value))
            ):
                return a_part_with_rows(self._local_results(value))
            if isinstance(
                value, tf.distribute.DistributedValues
            ) and not isinstance(value, _internals.Mirrored):
                return self._cross_device_ops.reduce(
                    reduce_op, value, destinations
                )
            return super(MirroredInputs, self)._reduce_to(
                reduce_op, value, destinations, options
            )

        return tf.nest.map_structure(reduce, value)


def a_part_with_rows(parts: Sequence[Any]) -> Any:
    """A part of a batch that says what the batch is like.

    Layers are not written for no rows, which all replicas of a worker may have:
    see `behind_its_data`.
    """
    for part in parts:
        if part.shape[:1] != [0]:
            return part
    return tf.zeros([1, *parts[0].shape[1:]], parts[0].dtype)


# No `in_place.Mixin`, see placed_inputs.py.
class _NotEmpty(Iterable):
    def __iter__(self):
        batches = super().__iter__()
        model = _internals.model_that_looks_at_data()
        if model is None and not _internals.keras_predicts():
            return batches
        return _with_any(batches)


def _with_any(batches):
    has_any = False
    for batch in batches:
        has_any = True
        yield batch
    if not has_any:
        raise ValueError(
            "There must be a batch to train, evaluate or predict on. Received: "
            "data without any. Look for a filter, a `take` or "
            "`drop_remainder=True` that leaves nothing, or for a generator "
            "that has been used up."
        )


def counted_in_steps(distributed: Any, num_replicas: int) -> Any:
    """A dataset of batches of replicas, whose length is in steps.

    TensorFlow counts the batches, of which a step takes one for each replica;
    Keras would wait for as many steps, and warn that data ran out.

    Args:
        distributed: A distributed dataset made from a function.
        num_replicas: How many replicas of this process take batches.
    """
    in_place.put(distributed, _CountedInSteps, num_replicas=num_replicas)
    return distributed


class _CountedInSteps(Iterable):
    @property
    def cardinality(self):
        count = int(super().cardinality)
        return count if count < 0 else -(-count // self.num_replicas)


def _has_mean(tensors):
    first = tensors[0]
    return (
        isinstance(first, tf.Tensor)  # and neither sparse nor ragged
        and first.dtype not in (tf.bool, tf.string)
        and all(tensor.shape == first.shape for tensor in tensors)
    )
