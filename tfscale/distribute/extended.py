"""What `MeshStrategy` does: where variables live, how replicas are summed."""

import contextlib
import threading

import tensorflow as tf

from tfscale.distribute import _tf_internals
from tfscale.distribute.variable import MeshVariable

_VARIABLE_CLASSES = {
    **_tf_internals.distribute_utils.VARIABLE_CLASS_MAPPING,
    tf.VariableSynchronization.ON_WRITE: MeshVariable,
}


class MeshExtended(_tf_internals.MirroredExtended):
    """The `extended` of a `MeshStrategy`.

    As far as tf.distribute is concerned a replica is its first stage's
    device: it gets the inputs and runs what has no other place. Where a
    replica has several devices, variables are made on its host and
    `PipelineModel` moves them (`placed_on`), so that building a model never
    puts all of it on one accelerator.

    Args:
        strategy: The `MeshStrategy`.
        devices: Canonical device names, `devices[replica][pipeline_rank]`.
    """

    def __init__(self, strategy, devices):
        self._device_rows = devices
        self._local = threading.local()
        super().__init__(
            strategy,
            devices=[row[0] for row in devices],
            cross_device_ops=SumOnEachDevice(),
        )

    @property
    def gradients_are_reduced(self) -> bool:
        """Whether this thread runs inside `reduced_gradients`."""
        return getattr(self._local, "reduced", False)

    @contextlib.contextmanager
    def reduced_gradients(self):
        """Within it, `optimizer.apply` takes gradients summed over replicas.

        Keras sums gradients after it has clipped, unscaled and checked them,
        which is wrong with more than one replica: whoever owns the training
        step sums first and applies in here, in replica context. Every replica
        then does the same to its own components, with no merge call, so that
        `apply` may stand inside a `tf.cond`.
        """
        before = self.gradients_are_reduced
        self._local.reduced = True
        try:
            yield
        finally:
            self._local.reduced = before

    @contextlib.contextmanager
    def placed_on(self, pipeline_rank: int):
        """Within it, variables are made on that stage's device, everywhere."""
        self._local.placement = [
            row[pipeline_rank] for row in self._device_rows
        ]
        try:
            yield
        finally:
            self._local.placement = None

    def _variable_devices(self, colocate_with):
        if colocate_with is not None:
            return colocate_with._devices
        placement = getattr(self._local, "placement", None)
        if placement:
            return placement
        if len(self._device_rows[0]) == 1:
            return self._devices
        return [
            _tf_internals.device_util.canonicalize("/device:CPU:0", device)
            for device in self._devices
        ]

    def _create_variable(self, next_creator, **kwargs):
        colocate_with = kwargs.pop("colocate_with", None)
        if not isinstance(
            colocate_with, (_tf_internals.DistributedVariable, type(None))
        ):
            # A single device: the state of a numpy dataset and the like.
            return super()._create_variable(
                next_creator, colocate_with=colocate_with, **kwargs
            )
        devices = self._variable_devices(colocate_with)

        def create_components(**kwargs):
            components = []
            for replica, device in enumerate(devices):
                if replica:
                    first = components[0]
                    kwargs["initial_value"] = first.read_value
                    # The slash makes the name absolute.
                    kwargs["name"] = (
                        f"{first.name.split(':')[0]}/replica_{replica}/"
                    )
                with tf.init_scope(), tf.device(device):
                    components.append(next_creator(**kwargs))
            return components

        return _tf_internals.distribute_utils.create_mirrored_variable(
            self._container_strategy(),
            create_components,
            _VARIABLE_CLASSES,
            _tf_internals.distribute_utils.VARIABLE_POLICY_MAPPING,
            **kwargs,
        )

    def _reduce_to(self, reduce_op, value, destinations, options):
        def reduce(value):
            # Keras asks for the mean of a batch to learn what it looks like,
            # even if it has none: then the first replica's part has to do.
            if (
                reduce_op == tf.distribute.ReduceOp.MEAN
                and isinstance(value, tf.distribute.DistributedValues)
                and not _has_mean(self._local_results(value))
            ):
                return self._local_results(value)[0]
            return super(MeshExtended, self)._reduce_to(
                reduce_op, value, destinations, options
            )

        return tf.nest.map_structure(reduce, value)

    def _use_merge_call(self):
        return not self.gradients_are_reduced and super()._use_merge_call()

    def _replica_ctx_all_reduce(self, reduce_op, value, options=None):
        if self.gradients_are_reduced:
            return value
        return super()._replica_ctx_all_reduce(reduce_op, value, options)


def _has_mean(tensors):
    first = tensors[0]
    return first.dtype not in (tf.bool, tf.string) and all(
        tensor.shape == first.shape for tensor in tensors
    )


class SumOnEachDevice(tf.distribute.ReductionToOneDevice):
    """Reduces a batch of tensors on every device that holds one of them.

    Each device gets the others' tensors and adds them up in the order of the
    replicas, so results are equal to the last bit, and no device waits for
    the sum of another one.
    """

    def batch_reduce_implementation(
        self, reduce_op, value_destination_pairs, options
    ):
        """See `tf.distribute.CrossDeviceOps`."""
        return [
            self._reduce_on_each(reduce_op, value)
            for value, _ in value_destination_pairs
        ]

    def _reduce_on_each(self, reduce_op, value):
        tensors = [tf.convert_to_tensor(v) for v in value.values]
        results = []
        for tensor in tensors:
            with tf.device(tensor.device):
                total = tf.add_n(tensors)
                if reduce_op == tf.distribute.ReduceOp.MEAN:
                    total /= tf.cast(len(tensors), total.dtype)
                results.append(total)
        return _tf_internals.distribute_utils.regroup(
            tuple(results), wrap_class=_tf_internals.Mirrored
        )
