"""The data of a `fit`, which notes its batches where that is possible."""

import warnings
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import fitting
from tfscale.adapters.epochs import follow
from tfscale.fit.fit import Fit
from tfscale.mesh.inputs.mesh_dataset import MeshDataset
from tfscale.throughput.arrivals import Arrivals


class NotedData:
    """The data of a `fit` that begins.

    Keras' dataset is replaced by one with the same batches just before its next
    iterator is created. Datasets are left as they are if parameter servers read
    them, if a function makes them for replicas, or if each worker has its own:
    their batches are known if they have one size.

    Attributes:
        arrivals: The batches that were noted, or None if none are.
        element_spec: What a replica gets in a step, as `tf.TypeSpec`s.
        known_sizes: Rows and tokens of a batch that is not noted, 0 if unknown.
    """

    def __init__(self, fit: Fit, strategy: tf.distribute.Strategy):
        self._fit = fit
        self._strategy = strategy
        self._noting: Any = None  # the dataset that Keras has now
        self.element_spec = fitting.element_spec_of(fit.epochs)
        source = _source(fitting.distributed_data(fit.epochs))
        self.arrivals = None
        if source is not None:
            self.arrivals = Arrivals(source.element_spec)
        else:
            self.known_sizes = self._known_sizes()

    def begin_iterator(self) -> None:
        """Called before Keras creates an iterator."""
        if self.arrivals is None:
            return
        epochs = self._fit.epochs
        data = fitting.distributed_data(epochs)
        if data is not self._noting:
            self._noting = _mapped(data, self.arrivals.noting, self._strategy)
            fitting.set_distributed_data(epochs, self._noting)
        self.arrivals.begin_iterator()

    def release(self) -> None:
        """Tells the epochs no more."""
        if self._fit.epochs is not None:
            follow(self._fit.epochs, on_iterator=None)

    def _known_sizes(self):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(self.element_spec)
        first, *_ = tf.nest.flatten(x)
        rows = first.shape[0] if first.shape.rank else None
        if rows is None:
            warnings.warn(
                "`Throughput` needs the number of rows of a batch. Received: "
                f"a distributed dataset of {self.element_spec}, so there are "
                "no figures. Pass the dataset itself to `fit`, or batch it "
                "with drop_remainder=True.",
                stacklevel=2,
            )
            return 0, 0
        rows *= self._strategy.num_replicas_in_sync
        is_tokens = first.dtype.is_integer and first.shape.rank == 2
        return rows, rows * (first.shape[1] or 0) if is_tokens else 0


def _source(data):
    """The dataset of batches, before they are divided, or None."""
    if isinstance(data, MeshDataset):
        options = data.given_dataset.options().experimental_distribute
        policies = tf.data.experimental.AutoShardPolicy
        is_divided = options.auto_shard_policy != policies.OFF
        return None if data.workers and not is_divided else data.given_dataset
    if isinstance(data, tf.data.Dataset):
        return data
    return fitting.source_of_distributed(data)


def _mapped(data, change, strategy):
    if isinstance(data, MeshDataset):
        return data.mapped(change)
    if isinstance(data, tf.data.Dataset):
        return change(data)
    return strategy.experimental_distribute_dataset(change(_source(data)))
