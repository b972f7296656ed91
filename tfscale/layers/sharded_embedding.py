"""An embedding whose rows lie on all parameter servers, and are read there."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.integers import check_integer


@keras.saving.register_keras_serializable(package="tfscale")
class ShardedEmbedding(keras.layers.Layer):
    """A `keras.layers.Embedding` in several variables, with the same numbers.

    Under a `tfscale.ParameterServerStrategy` each server has one of them.
    `keras.layers.Embedding` reads its whole table in each step; here each
    server looks up the rows of its own that occur in the batch, each once, and
    sends these. Gradients go back in the same way, as `tf.IndexedSlices`, and
    are applied where the rows are.

    Of S shards, shard s has the rows s, s + S, s + 2 S, ..., so that frequent
    tokens, which mostly have low numbers, are not all on one server.

    Each optimizer decides what it does on a server. Keras' optimizers apply the
    rule for dense gradients: `SGD` without momentum changes the rows of the
    batch only, `Adam` and all others that keep averages change every row in
    each step, with the numbers of a dense gradient and at its cost.

    Initial values are drawn for the whole table, in the memory of the chief.
    The whole table is saved, too, so that weights load with another
    number of shards.

    Args:
        input_dim: Integer, the number of rows.
        output_dim: Integer, size of an embedding.
        embeddings_initializer: Initializer of the table.
        mask_zero: Whether 0 stands for padding; see `keras.layers.Embedding`.
        num_shards: Integer, how many variables; by default as many as there
            are servers, and 1 without. The config of a built layer names it, so
            that slots of an optimizer fit.
        **kwargs: Other arguments of `keras.layers.Layer`.

    Call arguments:
        inputs: Dense integer tensor of any shape, values from 0 to
            `input_dim - 1`.

    Returns:
        Tensor of shape `(*inputs.shape, output_dim)` in the compute dtype.

    Raises:
        ValueError: If a size is no positive integer, or there are more shards
            than rows.

    Source: Li et al., Scaling Distributed Machine Learning with the Parameter
    Server (2014), section 4.2, on ranges of keys.

    Example: without servers, in three parts.

    >>> import keras
    >>> import tfscale
    >>> layer = tfscale.layers.ShardedEmbedding(7, 2, num_shards=3)
    >>> layer(keras.ops.convert_to_tensor([[6, 0, 6]])).shape
    TensorShape([1, 3, 2])
    >>> [tuple(shard.shape) for shard in layer.shards]
    [(3, 2), (2, 2), (2, 2)]
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        mask_zero: bool = False,
        num_shards: int | None = None,
        **kwargs: Any,
    ):
        check_integer("input_dim", input_dim)
        check_integer("output_dim", output_dim)
        if num_shards is not None:
            check_integer("num_shards", num_shards)
        super().__init__(**kwargs)
        self.input_dim = input_dim
        self.output_dim = output_dim
        self.embeddings_initializer = keras.initializers.get(
            embeddings_initializer
        )
        self.mask_zero = mask_zero
        self.supports_masking = mask_zero
        self.num_shards: Any = num_shards  # an integer once it is built
        self.autocast = False  # of rows, not of tables

    def build(self, input_shape: Any = None) -> None:
        """Makes the shards, in the scope of a strategy on its servers."""
        if self.num_shards is None:
            strategy = tf.distribute.get_strategy()
            servers = getattr(strategy, "num_servers", 1)
            self.num_shards = min(servers, self.input_dim)
        if self.num_shards > self.input_dim:
            raise ValueError(
                "Each shard of an embedding must have at least one row. "
                f"Received: num_shards={self.num_shards}, "
                f"input_dim={self.input_dim}. Omit `num_shards`."
            )
        with tf.init_scope():  # Here, not on the server of a shard.
            table = np.asarray(
                self.embeddings_initializer(
                    (self.input_dim, self.output_dim), dtype=self.variable_dtype
                )
            )
        count = self.num_shards
        self.shards = [
            self._add_shard(number, table[number::count])
            for number in range(count)
        ]
        self.built = True

    def _add_shard(self, number, rows):
        return self.add_weight(
            shape=rows.shape,
            initializer=lambda shape, dtype: tf.convert_to_tensor(rows, dtype),
            name=f"embeddings_{number}"
            if self.num_shards > 1
            else "embeddings",
        )

    @property
    def embeddings(self) -> tf.Tensor:
        """The whole table, of shape `(input_dim, output_dim)`."""
        rows = tf.range(self.input_dim)
        positions = [rows[s :: self.num_shards] for s in range(self.num_shards)]
        return tf.dynamic_stitch(positions, [v.value for v in self.shards])

    def call(self, inputs: Any) -> Any:
        """See the class."""
        if inputs.dtype not in ("int32", "int64"):
            inputs = tf.cast(inputs, "int32")
        # Each row is sent once, and its gradients come back added up.
        rows, positions = tf.unique(tf.reshape(inputs, [-1]))
        outputs = tf.gather(self._look_up(rows), positions)
        outputs = tf.reshape(
            outputs, tf.concat([tf.shape(inputs), [self.output_dim]], 0)
        )
        outputs.set_shape([*inputs.shape, self.output_dim])
        return tf.cast(outputs, self.compute_dtype)

    def _look_up(self, rows):
        """Embeddings of rows, each read on the device of its shard."""
        shards, count = self.shards, self.num_shards
        if count == 1:
            return tf.gather(shards[0].value, rows)
        owners = tf.cast(rows % count, tf.int32)
        of_shards = tf.dynamic_partition(rows // count, owners, count)
        positions = tf.dynamic_partition(tf.range(tf.size(rows)), owners, count)
        found = [tf.gather(v.value, r) for v, r in zip(shards, of_shards)]
        return tf.dynamic_stitch(positions, found)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """See `keras.layers.Embedding`."""
        return keras.ops.not_equal(inputs, 0) if self.mask_zero else None

    def compute_output_shape(self, input_shape: Any) -> Any:
        """See `keras.Layer`."""
        return (*input_shape, self.output_dim)

    def save_own_variables(self, store: Any) -> None:
        """See `keras.Layer`; one table, like a `keras.layers.Embedding`."""
        table = np.empty((self.input_dim, self.output_dim), self.variable_dtype)
        for number, shard in enumerate(self.shards):
            table[number :: self.num_shards] = shard.numpy()
        store["0"] = table

    def load_own_variables(self, store: Any) -> None:
        """See `keras.Layer`; whatever the number of shards was."""
        table = np.asarray(store["0"])
        if table.shape != (self.input_dim, self.output_dim):
            raise ValueError(
                "A table must have the shape of the embedding that loads it. "
                f"Received: {table.shape} for {self.name!r} of shape "
                f"{(self.input_dim, self.output_dim)}."
            )
        for number, shard in enumerate(self.shards):
            shard.assign(table[number :: self.num_shards])

    def get_config(self) -> dict[str, Any]:
        """See `keras.Layer`."""
        return {
            **super().get_config(),
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "embeddings_initializer": keras.initializers.serialize(
                self.embeddings_initializer
            ),
            "mask_zero": self.mask_zero,
            "num_shards": self.num_shards,
        }
