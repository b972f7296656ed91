"""The part of a batch that a thread works on: a replica's rows, say."""

import contextlib
import warnings
from collections.abc import Callable
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfscale import step_context
from tfscale.tensor_parallel import layer_losses
from tfscale.whole_batch import layer_state
from tfscale.whole_batch import model_loss


class BatchShard:
    """A part of a batch, which counts by its rows and by what they divide.

    Created in the thread that works on it, in the graph that it writes.

    Args:
        rows: Number of its rows, a scalar.
        total: Sums over the parts a tensor that each of them has. All parts
            call it for the same ones, in one order.
        num_replicas: By what Keras divides means.
        layers: Those that may note down losses, which `total` leaves alone.
        weight: What gradients of the part are multiplied by afterwards.
        all_rows: Number of rows of all parts, if that is known.
        is_whole: Whether there is no other part.
        compiled: Where the losses given to `compile` are noted by a caller of
            `compute_loss` that weighs and logs them itself, or None.

    Attributes:
        is_divided: Whether its loss has been divided for the sum over parts.
        changes: Notes down what is assigned to, or None.
    """

    def __init__(
        self,
        rows: tf.Tensor,
        total: Callable[[tf.Tensor], tf.Tensor],
        num_replicas: int,
        layers: Sequence[keras.Layer] = (),
        weight: tf.Tensor | float = 1.0,
        all_rows: tf.Tensor | None = None,
        is_whole: bool = False,
        compiled: list | None = None,
    ):
        self.rows = rows
        self.num_replicas = num_replicas
        self.weight = weight
        self.is_whole = is_whole
        self.compiled = compiled
        self.is_divided = False
        self.changes: layer_state.Changes | None = None
        self._total = total
        self._share = None
        if all_rows is not None:
            self._share = tf.math.divide_no_nan(rows, all_rows)
        self._layers = layers
        self.graph = tf.compat.v1.get_default_graph()

    @property
    def share(self) -> tf.Tensor:
        """Of the rows of the batch, a scalar; 0 for no rows."""
        # Not a `functools.cached_property`: one lock for all threads, and the
        # first replica to hold it waits for the others in `total`.
        if self._share is None:
            total = self.total(self.rows)
            self._share = tf.math.divide_no_nan(self.rows, total)
        return self._share

    def totals(self, numbers: tf.Tensor) -> tf.Tensor:
        """The sums over the parts of a vector.

        That of the rows, which is needed too, goes with them.
        """
        if self._share is not None:
            return self.total(numbers)
        with_rows = tf.concat([numbers, [self.rows]], axis=0)
        *totals, rows = tf.unstack(self.total(with_rows))
        self._share = tf.math.divide_no_nan(self.rows, rows)
        return tf.stack(totals)

    def total(self, tensor: tf.Tensor) -> tf.Tensor:
        """The sum of a tensor over the parts."""
        # Another replica that runs meanwhile calls the same layers.
        with layer_losses.kept(self._layers):
            # It counts only, and what it is made of is not to be asked for.
            return self._total(tf.stop_gradient(tensor))

    def loss_of(self, model, compute_loss, args, kwargs) -> tf.Tensor | None:
        """What `compute_loss` of a model returns, of this part."""
        return model_loss.loss_of(self, model, compute_loss, args, kwargs)

    def compiled_loss_of(
        self, compile_loss, y_true, y_pred, sample_weight
    ) -> tf.Tensor | None:
        """What a `CompileLoss` returns, of this part."""
        return model_loss.compiled_loss_of(
            self, compile_loss, y_true, y_pred, sample_weight
        )

    @contextlib.contextmanager
    def entered(self):
        """Within it, this is the part that this thread works on."""
        with step_context.within(batch_shard=self):
            yield


def warn_of_undivided() -> None:
    """Warns if a `train_step` has nowhere divided its loss over the parts."""
    batch_shard = step_context.current().batch_shard
    if (
        batch_shard is None
        or batch_shard.num_replicas == 1
        or batch_shard.is_divided
    ):
        return
    warnings.warn(
        "Gradients are added up over replicas, so the loss of each has to be "
        "its part of the loss of the whole batch. Received: a `train_step` "
        "whose loss comes neither from `compute_loss` nor from a loss of "
        "Keras, and that has not asked for the number of replicas, "
        f"{batch_shard.num_replicas}: gradients are so many times too large "
        "if it is a mean over the rows that it has. Use "
        "`self.compute_loss(...)`, to which a layer's `add_loss` adds, or "
        "divide by `tf.distribute.get_strategy().num_replicas_in_sync`.",
        stacklevel=2,
    )
