"""How long the steps of a `fit` take."""

import time

import keras


class StepClock(keras.callbacks.Callback):
    """Seconds of each step of a `fit`, without what `fit` does around them."""

    def __init__(self):
        super().__init__()
        self.times = []

    def on_train_batch_begin(self, batch, logs=None):
        """Notes when the step began."""
        del batch, logs
        self._begin = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        """Adds the time of the step."""
        del batch
        float(logs["loss"])  # JAX is not done before somebody asks
        self.times.append(time.perf_counter() - self._begin)
