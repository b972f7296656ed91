"""Which files `BackupAndRestore` leaves, and what it does without them."""

import os
import shutil
import threading
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tfscale.backup.files import folder
from tfscale.backup.files import storage
from tfscale.callbacks import BackupAndRestore

X, Y = np.ones((32, 3), "float32"), np.ones((32, 2), "float32")
STEPS = 8


class Interrupted(Exception):
    pass


class At(keras.callbacks.Callback):
    """Counts steps, and does something after some of them."""

    def __init__(self, step, action):
        super().__init__()
        self._step, self._action = step, action
        self.count = 0

    def on_train_batch_end(self, batch, logs=None):
        self.count += 1
        if self.count == self._step:
            self._action()

    def get_state(self):
        return None

    def set_state(self, state):
        pass


def interrupt():
    raise Interrupted


class BackupFilesTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.path = self.create_tempdir().full_path

    def fit(self, step=-1, action=interrupt, verbose=0, **options):
        """Trains; returns how many steps were made."""
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        seen = At(step, action)
        backup = BackupAndRestore(self.path, **{"save_freq": 2, **options})
        model.fit(X, Y, batch_size=4, verbose=verbose, callbacks=[seen, backup])
        return seen.count

    def interrupt(self, step, **options):
        with self.assertRaises(Interrupted):
            self.fit(step, **options)

    def test_a_run_that_ended_well_leaves_nothing(self):
        self.fit()
        self.assertEmpty(os.listdir(self.path))
        self.fit(delete_checkpoint=False)
        for name in os.listdir(self.path):
            self.assertStartsWith(name, "backup-")

    def test_a_listing_that_fails_once_is_tried_again(self):
        # What is read first ended the start, with the error of the store.
        self.interrupt(5)
        names, failed = storage.LocalStorage.names, []

        def fail_once(of):
            is_main = threading.current_thread() is threading.main_thread()
            if is_main and not failed:  # not the writer of the first `fit`
                failed.append(of.path_of(""))
                raise tf.errors.UnavailableError(None, None, "503")
            return names(of)

        with (
            mock.patch.object(folder, "_WAITS", (0.0,)),
            mock.patch.object(storage.LocalStorage, "names", fail_once),
        ):
            self.assertLess(self.fit(), STEPS)
        self.assertLen(failed, 1)

    @parameterized.parameters((0, 2), (2, 0))
    @pytest.mark.crossing(every=2)
    def test_a_run_goes_on_with_or_without_a_progress_bar(self, before, then):
        """The states of the callbacks were one too many, or one too few."""
        self.interrupt(5, verbose=before)
        self.assertLess(self.fit(verbose=then), STEPS)

    def test_what_it_notes_is_there_while_it_runs(self):
        names = []
        self.fit(3, lambda: names.extend(os.listdir(self.path)))
        self.assertContainsSubset({"LOCK", "PROGRESS"}, names)

    @parameterized.parameters(bytes(16), b"\xff\xfe", b"none", b"")
    def test_what_it_notes_counts_for_nothing_if_it_is_no_number(self, content):
        """After a power loss it was zeros, and no restart worked."""
        self.interrupt(5)
        with open(f"{self.path}/PROGRESS", "wb") as file:
            file.write(content)
        self.assertLess(self.fit(), STEPS)

    @parameterized.parameters(
        (os.mkdir,),
        (os.mkfifo,),
        (lambda path: os.symlink(f"{path}-elsewhere", path),),
    )
    def test_nor_if_it_is_no_file(self, make):
        make(f"{self.path}/PROGRESS")
        self.assertEqual(self.fit(), STEPS)
        self.assertFalse(os.path.exists(f"{self.path}/PROGRESS-elsewhere"))

    def test_steps_that_no_backup_has_are_said(self):
        self.interrupt(3, save_freq=7)
        with self.assertLogs(level="WARNING") as logs:
            self.assertEqual(self.fit(), STEPS)
        self.assertRegex(
            logs.output[0], "No backup is in .* which 3 steps .* begins anew"
        )

    def test_a_folder_that_is_removed_comes_back(self):
        names = []

        def look():
            names.extend(os.listdir(self.path))

        removed = At(2, lambda: shutil.rmtree(self.path))
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        backup = BackupAndRestore(self.path, save_freq=3)
        model.fit(
            *(X, Y),
            batch_size=4,
            verbose=0,
            callbacks=[removed, At(7, look), backup],
        )
        self.assertContainsSubset({"LOCK", "PROGRESS"}, names)
        self.assertEmpty(os.listdir(self.path))


if __name__ == "__main__":
    tf.test.main()
