"""Distributes datasets over the replicas of a mesh."""

from collections.abc import Callable

import tensorflow as tf

from tfscale._internals import datasets
from tfscale._internals import fitting
from tfscale._internals import symbols
from tfscale.adapters.model import adapt_spec_built_model
from tfscale.graphs import dataset_graph
from tfscale.mesh.inputs import common_configuration
from tfscale.mesh.inputs import common_order
from tfscale.mesh.inputs import rows_by_speed
from tfscale.mesh.inputs import uneven_data
from tfscale.mesh.inputs.mesh_dataset import MeshDataset
from tfscale.mesh.inputs.mesh_dataset import MeshDatasetFromFunction
from tfscale.mesh.inputs.mesh_dataset import MeshDatasetOfPython
from tfscale.mesh.mesh_config import MeshConfig

_NUMBERS = (
    *(tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.bool),
    *(tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8),
    *(tf.complex64, tf.complex128),
)


class MeshInputs:
    """Distributes datasets over replicas, on this worker and on others.

    TensorFlow's datasets for several devices fetch batches ahead to each. CPUs
    gain nothing by that. Devices of other machines would fetch by calls to this
    one; the step sends them their inputs instead. `replica_devices` get the
    batches, one device of each replica.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        host: str,
        devices: tuple[str, ...],
        replica_devices: tuple[str, ...],
        config: MeshConfig,
    ):
        machine = host.rpartition("/")[0]
        self._strategy = strategy
        self._host = host
        self._devices = replica_devices
        self._config = config
        self._workers = config.workers
        self._is_on_cpu = all("CPU" in device for device in devices)
        self._fetches_ahead = not self._is_on_cpu and all(
            device.startswith(machine) for device in devices
        )

    def of_dataset(
        self,
        dataset: tf.data.Dataset,
        options: tf.distribute.InputOptions | None = None,
    ) -> MeshDataset:
        """See `tf.distribute.Strategy.experimental_distribute_dataset`."""
        call = fitting.keras_call()
        if call is None or call.stage != "create":
            return self._of_dataset(dataset, options)
        if self._workers is not None:
            common_configuration.check(call, self._workers)
        kind = MeshDataset
        if fitting.is_of_python(call.epochs):
            kind = MeshDatasetOfPython
        distributed = self._of_dataset(dataset, options, kind)
        if not distributed.is_probed:
            adapt_spec_built_model(call.model)
        return distributed

    def _of_dataset(self, dataset, options, kind=MeshDataset):
        if self._config.shard_speeds is not None:
            has_workers = self._workers is not None
            rows_by_speed.check(dataset, has_workers=has_workers)
        if self._workers is not None:
            common_order.check(dataset, self._workers.coordination)
        source, context = dataset, self._context()
        if (
            context.num_replicas_in_sync > 1
            or self._workers is not None
            or bool(options)
            or not self._is_on_cpu
        ):
            source = _copied_from_python(source)
        source = datasets.with_sorted_sparse(datasets.without_none(source))
        if kind is MeshDatasetOfPython:
            source = source.with_options(_not_read_ahead())
        is_ordinary = not options and (
            self._is_on_cpu or kind is MeshDatasetOfPython
        )

        is_divided_by_worker = (
            self._workers is not None
            and rows_by_speed.speeds_for(source, self._config) is None
        )

        def distribute(source):
            distributed = kind(
                self._input_workers(options, is_ordinary),
                self._strategy,
                source,
                num_replicas_in_sync=context.num_replicas_in_sync,
                # TensorFlow divides batches over the workers of a context.
                input_context=context if is_divided_by_worker else None,
                options=datasets.ORDINARY_ITERATOR if is_ordinary else options,
            )
            distributed.workers = self._workers
            distributed.given_dataset = dataset
            distributed.has_ordinary_iterator = is_ordinary
            distributed.is_probed = (
                kind is MeshDataset and not common_order.of_pipelines(dataset)
            )
            return distributed

        distributed = distribute(source)
        # A later one is not probed, and has nothing to be mapped for.
        distributed.mapped = lambda change: distribute(change(source))
        return distributed

    def from_function(
        self,
        dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset],
        options: tf.distribute.InputOptions | None = None,
    ) -> MeshDatasetFromFunction:
        """See `tf.distribute.Strategy.distribute_datasets_from_function`."""
        if self._config.shard_speeds is not None:
            raise ValueError(
                "Batches that a function makes for each replica cannot be "
                "divided by `speeds`. Received: "
                f"`distribute_datasets_from_function` on a mesh with "
                f"speeds={list(self._config.shard_speeds)}. Pass whole "
                "batches to `fit` or `experimental_distribute_dataset`, or "
                "omit `speeds`."
            )
        pipelines: list[str] = []

        def of_worker(context):
            dataset = datasets.without_none(dataset_fn(context))
            pipelines.append(common_order.of_pipelines(dataset))
            if self._workers is None:
                return dataset
            return uneven_data.padded_to_longest(dataset, self._workers)

        is_ordinary = self._is_on_cpu and not options
        distributed = MeshDatasetFromFunction(
            self._input_workers(options, is_ordinary),
            self._strategy,
            [self._context()],
            of_worker,
            datasets.ORDINARY_ITERATOR if is_ordinary else options,
        )
        distributed.has_ordinary_iterator = is_ordinary
        distributed.workers = self._workers
        distributed.batches_per_step = len(self._devices)
        distributed.is_probed = not any(pipelines)
        return distributed

    def _context(self):
        count, index = 1, 0
        if self._workers is not None:
            count, index = self._workers.count, self._workers.index
        return tf.distribute.InputContext(
            num_input_pipelines=count,
            input_pipeline_id=index,
            num_replicas_in_sync=count * len(self._devices),
        )

    def _input_workers(self, options, is_ordinary):
        mode = tf.distribute.InputReplicationMode.PER_REPLICA
        if options and options.experimental_replication_mode == mode:
            raise NotImplementedError(
                "A mesh has one dataset for all replicas of a worker. "
                "Received: InputOptions with "
                "`experimental_replication_mode=PER_REPLICA`. Remove it."
            )
        fetches = self._fetches_ahead and not is_ordinary
        if options:
            fetches = options.experimental_fetch_to_device
        devices = (
            self._devices if fetches else [self._host] * len(self._devices)
        )
        return symbols.InputWorkers([(self._host, tuple(devices))])


def _not_read_ahead() -> tf.data.Options:
    """Options without which tf.data makes maps parallel: these read ahead."""
    options = tf.data.Options()
    options.experimental_optimization.map_parallelization = False
    options.experimental_optimization.inject_prefetch = False
    return options


def _copied_from_python(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """A dataset whose records, if Python makes them, are copies.

    A tensor that a Python function returns to tf.data may share the memory of
    the user's array. TensorFlow reuses buffers that have no other owner:
    targets were overwritten by differences of targets and predictions.
    """
    if not dataset_graph.calls_python(dataset):
        return dataset

    def copy(tensor):
        if tensor is None or tensor.dtype not in _NUMBERS:
            return tensor
        return tf.raw_ops.DeepCopy(x=tensor)

    return datasets.map_values(
        dataset,
        lambda value: tf.nest.map_structure(
            copy, value, expand_composites=True
        ),
    )
