"""A training that ends in an error after some batches, as by a user's code."""

import keras


class Interrupted(Exception):
    """The error."""


class Interrupt(keras.callbacks.Callback):
    """Raises it once so many batches are done; never if that is None."""

    def __init__(self, after):
        super().__init__()
        self._after, self._done = after, 0

    def on_train_batch_end(self, batch, logs=None):
        self._done += 1
        if self._done == self._after:
            raise Interrupted

    def get_state(self):
        return None
