"""The way of one batch of `fit`: few files, few changes of folder.

A file is on it if one of its functions is running while an operation of the
step is made: it makes that operation, or calls what does. Others answer
questions. The way begins with a train function that is traced anew, of a model
whose stages have been traced. It is drawn in CONTRIBUTING.md.
"""

import itertools
import os
import re
import sys
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest

import tfscale
from tests import source_files
from tfscale._internals import releases

# Keras 3.15 draws a batch in the function, later releases before it.
_NEW = () if releases.IS_3_15 else ("adapters/function.py",)
_PACKAGE = os.path.join(source_files.REPOSITORY, "tfscale", "")


def way():
    """The files of tfscale, in the order in which they make operations."""
    strategy = tfscale.MeshStrategy(tfscale.device_mesh(data=2, pipeline=2))
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(4, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(4),
            ]
        )
        model = tfscale.PipelineModel(model, num_microbatches=2)
        model.compile("sgd", "mse")
    x = np.ones((8, 4), "float32")
    model.fit(x, x, batch_size=8, verbose=0)
    model.train_function = None
    found, make = {}, tf.Graph._create_op_internal

    def make_and_note(*args, **kwargs):
        frame, stack = sys._getframe(1), []
        while frame is not None:
            stack.append(frame.f_code.co_filename)
            frame = frame.f_back
        for path in reversed(stack):
            if path.startswith(_PACKAGE):
                found[path.removeprefix(_PACKAGE)] = None
        return make(*args, **kwargs)

    with mock.patch.object(tf.Graph, "_create_op_internal", make_and_note):
        model.fit(x, x, batch_size=8, verbose=0)
    return [path for path in found if path not in _NEW]


class WayTest(absltest.TestCase):
    def test_it_is_short_and_drawn(self):
        found = way()
        self.assertLessEqual(len(found), 22, found)
        folders = [path.partition("/")[0] for path in found]
        entered = [folder for folder, _ in itertools.groupby(folders)]
        self.assertLessEqual(len(entered), 15, entered)
        path = os.path.join(source_files.REPOSITORY, "CONTRIBUTING.md")
        with open(path) as file:
            text = file.read()
        drawing = text[text.index("The way of one batch of `fit`") :]
        drawn = re.findall(r"[\w/]+\.py", drawing.split("```")[1])
        self.assertEqual(drawn, found)


if __name__ == "__main__":
    absltest.main()
