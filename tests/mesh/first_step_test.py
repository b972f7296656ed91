import contextlib
import io
import time
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

import tfscale
from tfscale.mesh import first_step


class SlowToTrace(keras.layers.Layer):
    def call(self, x):
        if not isinstance(x, keras.KerasTensor):
            time.sleep(0.5)
        return x


class FirstStepTest(tf.test.TestCase, parameterized.TestCase):
    def printed(self, model, seconds, verbose=2, **kwargs):
        x = np.ones((8, 4), "float32")
        text = io.StringIO()
        with (
            mock.patch.object(first_step, "_SECONDS", seconds),
            contextlib.redirect_stdout(text),
        ):
            model.fit(x, x, batch_size=4, verbose=verbose, **kwargs)
        return text.getvalue()

    def times_printed(self, *args, **kwargs):
        return self.printed(*args, **kwargs).count("Tracing and compiling")

    def model(self, layer, **axes):
        strategy = tfscale.MeshStrategy(tfscale.device_mesh(**axes))
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((4,)), layer, keras.layers.Dense(4)]
            )
            if "pipeline" in axes:
                model = tfscale.PipelineModel(model, num_microbatches=2)
            model.compile("sgd", "mse")
        return model

    @parameterized.parameters({"data": 2}, {"data": 1}, {"pipeline": 2})
    @pytest.mark.crossing(every=3)
    def test_a_long_trace_is_said_once(self, **axes):
        model = self.model(SlowToTrace(), **axes)
        self.assertEqual(self.times_printed(model, 0.1, epochs=2), 1)
        # Another `fit` traces nothing.
        self.assertEqual(self.times_printed(model, 0.0), 0)

    @parameterized.parameters(
        ({"data": 2}, True),
        ({"data": 1}, False),
        ({"data": 2, "pipeline": 2}, False),
    )
    @pytest.mark.crossing(every=3)
    def test_replicas_are_told_what_is_traced_once(self, axes, is_told):
        said = self.printed(self.model(SlowToTrace(), **axes), 0.1)
        self.assertIn("Tracing and compiling", said)
        self.assertEqual("PipelineModel(model" in said, is_told)

    def test_what_cannot_be_a_stage_is_not_told_to_be_one(self):
        class Subclass(keras.Model):
            def __init__(self):
                super().__init__()
                self.layer = SlowToTrace()
                self.dense = keras.layers.Dense(4)

            def call(self, x):
                return self.dense(self.layer(x))

        with tfscale.MeshStrategy(tfscale.device_mesh(data=2)).scope():
            model = Subclass()
            model.compile("sgd", "mse")
        said = self.printed(model, 0.1)
        self.assertIn("Tracing and compiling", said)
        self.assertNotIn("PipelineModel", said)

    def test_a_short_one_and_a_silent_one_are_not_said(self):
        model = self.model(SlowToTrace(), data=2)
        self.assertEqual(self.times_printed(model, 0.1, verbose=0), 0)
        model = self.model(keras.layers.ReLU(), data=2)
        self.assertEqual(self.times_printed(model, 60.0), 0)

    def test_what_comes_after_the_step_is_not_said(self):
        begun = mock.Mock()

        def told(call, steps):
            text = io.StringIO()
            with (
                mock.patch.multiple(
                    first_step,
                    _SECONDS=0.0,
                    fitting=mock.Mock(
                        keras_call=lambda thread: call,
                        steps_begun=lambda epochs: steps,
                    ),
                ),
                contextlib.redirect_stdout(text),
            ):
                first_step._tell("line", 1, lambda: begun, 1)
            return text.getvalue().count("line")

        running = mock.Mock(epochs=begun)
        self.assertEqual(told(running, 1), 1)
        self.assertEqual(told(running, 2), 0)  # in a later step
        self.assertEqual(told(mock.Mock(), 1), 0)  # in a validation
        self.assertEqual(told(None, 1), 0)  # ended


if __name__ == "__main__":
    absltest.main()
