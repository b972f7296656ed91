"""A training that ends in its middle, within the process of a test."""

import keras

from tfscale.backup.files.writer import Writer


class Killed(Exception):
    """A training has ended, as it was asked to."""


class KilledAt(keras.callbacks.Callback):
    """Ends a training after a batch of an epoch; backups keep nothing of it."""

    def __init__(self, batch):
        super().__init__()
        self._batch = batch

    def on_train_batch_end(self, batch, logs=None):
        if batch == self._batch:
            raise Killed

    def get_state(self):
        return None

    def set_state(self, state):
        pass


def wait_for_saves():
    """Returns once the saves of trainings that have ended are written."""
    writer = Writer()  # one thread serves all
    writer.start(int)
    writer.wait()
