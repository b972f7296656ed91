"""A Keras model whose steps run on workers that do not wait for each other."""

from typing import Any

import keras
import tensorflow as tf

from tfscale.parameter_server import checks
from tfscale.parameter_server.step_queue import explained
from tfscale.parameter_server.trainer import ParameterServerTrainer
from tfscale.parameter_server.worker_dataset import PerWorkerDataset


# A saved instance loads as the plain model, see wrapped_model.py.
@keras.saving.register_keras_serializable(package="tfscale")
class ParameterServerModel(ParameterServerTrainer):
    """Trains a Keras model on the workers of a `ParameterServerStrategy`.

    `compile`, `fit`, `evaluate`, `predict` and the `*_on_batch` methods are
    those of Keras. What is saved is the plain model.

    `compile` is called in the strategy's scope, with an optimizer that was made
    there and is right where steps do not wait for each other: one that
    accumulates gradients, scales losses, or overwrites weights with averages in
    training is refused.

    `fit` takes a `tf.data.Dataset` without end, created after the strategy, and
    `steps_per_epoch`. Its batches are dealt out: of W workers each one makes
    all of them and trains on every W-th. Where that costs too much, pass a
    function from a `tf.distribute.InputContext` to the dataset of that worker,
    such as `lambda context: tfscale.data.pipeline(..., batch_size=W * 32,
    input_context=context).repeat()`, of which each gets 32 rows.

    An epoch is over when all of its steps are: metrics and `iterations` count
    each step once, and callbacks of epochs see the variables at rest. Callbacks
    of batches are called as steps are handed out, up to eight for each worker
    ahead of those that are over, whose metrics they get. `evaluate` and
    `predict` take any data; the chief reads it and hands each batch to a
    worker, and results are those of one device.

    With one worker the numbers are those of one device. With several, weights
    and slots are those of asynchronous training (see the strategy);
    moving statistics of `BatchNormalization` are those of the last worker to
    write, and workers may draw the same dropout masks for different batches.

    Training continues without a lost worker; another one runs its step again,
    which may then have changed the variables twice. A worker that comes back at
    the same address joins again, and begins its data again; several lost ones
    join once all are back. A parameter server that is lost ends the training
    with a `ConnectionError`.

    Args:
        model: A built Keras model of any kind, made in the scope of the
            strategy. A `train_step` or `test_step` of its own is called. If
            it is compiled, this is too.

    Raises:
        TypeError: If `model` is no Keras model.
        ValueError: If not in the scope of a `ParameterServerStrategy`, or if
            the model was made outside it or is not built.

    Example: in the chief of a cluster, see `docs/strategies.md`.

    >>> import keras
    >>> import tfscale
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> tfscale.ParameterServerModel(model)
    Traceback (most recent call last):
    ...
    ValueError: `ParameterServerModel` must be made in the scope of a...
    """

    def __init__(self, model: keras.Model):
        checks.check_strategy(tf.distribute.get_strategy())
        checks.check_model(model)
        super().__init__(model)
        if model.compiled:
            self._compile_around()

    def _compile_in_scope(self, *, run_eagerly, jit_compile, **arguments):
        checks.check_steps(run_eagerly, jit_compile)
        self.model.compile(jit_compile=jit_compile, **arguments)
        self._compile_around()

    def _compile_around(self):
        self._metrics_are_checked = False
        model = self.model
        checks.check_optimizer(model)
        keras.Model.compile(
            self,
            optimizer=model.optimizer,
            steps_per_execution=model.steps_per_execution,
            jit_compile=False,
            auto_scale_loss=False,  # built already, if it can be
        )

    def fit(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        """See `keras.Model.fit`, and the class for what it takes.

        Raises:
            ConnectionError: If a parameter server is lost.
            ValueError: If `x` is no dataset, ends, or was made before the
                strategy; if there is no `steps_per_epoch`.
        """
        checks.check_callbacks(kwargs.get("callbacks"))
        if callable(x) and not isinstance(x, tf.data.Dataset):
            checks.check_no_class_weight(kwargs.get("class_weight"))
            x = PerWorkerDataset(x, self.distribute_strategy.num_workers)
        checks.check_training_data(x, kwargs.get("steps_per_epoch"))
        kwargs.setdefault("shuffle", False)  # The dataset does that.
        with explained(self.distribute_strategy.cluster):  # callbacks too
            return super().fit(x, *args, **kwargs)

    def quantize(self, *args: Any, **kwargs: Any) -> None:
        """Refused: workers run functions that know the float variables."""
        raise ValueError(
            "A model on parameter servers must be quantized before it is "
            f"wrapped. Received: `quantize` of a `{type(self).__name__}`. Call "
            "it on the plain model, and wrap that."
        )

    def predict(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """See `keras.Model.predict`; several workers take part."""
        # The number of batches of one call of the function below.
        before = self.steps_per_execution
        self.steps_per_execution = 2 * self.distribute_strategy.num_workers
        try:
            return super().predict(x, *args, **kwargs)
        finally:
            self.steps_per_execution = before
