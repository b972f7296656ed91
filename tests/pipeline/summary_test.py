"""Summaries: to the letter, and in the units that Keras prints."""

import io
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tfscale.pipeline import summary
from tfscale.pipeline.stages.plan import make_plan
from tfscale.schedules.named_schedules import gpipe
from tfscale.schedules.named_schedules import one_f_one_b

LOCAL = "/job:localhost/replica:0/task:0/device:"
WORKER = "/job:worker/replica:0/task:1/device:"
DEVICES = ((f"{LOCAL}CPU:0", f"{LOCAL}CPU:1"),)

# A layer has 4,160 parameters of 4 bytes, a tensor of a microbatch 1 KB.
# Stage 0: two layers, four times (weights, gradients, two slots), and for each
# of two microbatches its input and two ReLUs: 133,120 + 6,144 bytes. Stage 1:
# three times two layers, gradients of three, and for one microbatch its input,
# three ReLUs and what the loss keeps: 99,840 + 49,920 + 5,120 bytes. Both: the
# gradients of a layer and of its ReLU, 16,640 + 1,024 bytes.
TABLE = """\
Pipeline: "tied"
┏━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━┳━━━━━━━━┳━━━━━━━━━━━━━┳━━━━━━━━┓
┃ Stage ┃ Layers                  ┃ Param # ┃  FLOPs ┃      Memory ┃ Device ┃
┡━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━╇━━━━━━━━╇━━━━━━━━━━━━━╇━━━━━━━━┩
│     0 │ shared, dense_0         │   8,320 │ 40.0 % │   178.00 KB │ CPU:0  │
│       │                         │         │        │ 2 x 3.00 KB │        │
├───────┼─────────────────────────┼─────────┼────────┼─────────────┼────────┤
│     1 │ dense_1, dense_2,       │   8,320 │ 60.0 % │   194.25 KB │ CPU:1  │
│       │ shared                  │         │        │ 1 x 5.00 KB │        │
└───────┴─────────────────────────┴─────────┴────────┴─────────────┴────────┘
 Schedule: 1f1b, 4 microbatches
 Predicted bubble: 28.6 % of the devices' time
 Predicted speed-up over one device: 1.43 (on 2 devices)
 Memory: weights, gradients, 2 optimizer slots per variable, what a backward
 computes, and activations: microbatches in flight x one of 4 rows
 Tied variable: shared/kernel of stages 0, 1 lives in stage 0
 Tied variable: shared/bias of stages 0, 1 lives in stage 0"""


def _plan(schedule=None, **kwargs):
    """A shared layer at both ends of a chain."""
    inputs = keras.Input((64,))
    shared = keras.layers.Dense(64, activation="relu", name="shared")
    x = shared(inputs)
    for index in range(3):
        x = keras.layers.Dense(64, activation="relu", name=f"dense_{index}")(x)
    return make_plan(
        keras.Model(inputs, shared(x), name="tied"),
        schedule or one_f_one_b(2, 4),
        ["dense_1"],
        **{"microbatch_size": 4, **kwargs},
    )


def _text(plan, devices=DEVICES, line_length=77, **kwargs):
    texts = []
    summary.print_summary(
        plan,
        devices,
        line_length=line_length,
        print_fn=texts.append,
        **kwargs,
    )
    (text,) = texts
    return text


class SummaryTextTest(tf.test.TestCase, parameterized.TestCase):
    def _lines(self, plan, devices=DEVICES, **kwargs):
        return _text(plan, devices, **kwargs).splitlines()

    def test_it_looks_like_this(self):
        self.maxDiff = None
        self.assertEqual(self._lines(_plan()), TABLE.splitlines())

    def test_all_microbatches_are_in_flight_under_gpipe(self):
        lines = self._lines(_plan(gpipe(2, 4), microbatch_size=8))
        self.assertIn("│  4 x 6.00 KB │", lines[5])
        self.assertIn("│ 4 x 10.00 KB │", "\n".join(lines))
        self.assertIn(" Schedule: gpipe, 4 microbatches", lines)

    def test_what_is_recomputed_is_there_once(self):
        lines = self._lines(_plan(recompute=True))
        self.assertIn("2 x 1.00 KB", lines[5])
        self.assertIn("+ 2.00 KB", lines[6])
        self.assertIn(
            " Schedule: 1f1b, 4 microbatches, forwards recomputed", lines
        )

    def test_parameters_are_those_that_keras_counts(self):
        x = inputs = keras.Input((20,))
        x = keras.layers.Dropout(0.5, name="dropout")(x)
        x = keras.layers.BatchNormalization(name="norm")(x)
        x = keras.layers.Dense(5)(x)
        plan = make_plan(keras.Model(inputs, x), one_f_one_b(2, 2), ["norm"])
        lines = self._lines(plan)
        self.assertIn("│       0 │", lines[4])  # and not the seed's 2
        self.assertIn(f"│     {20 * 4 + 21 * 5} │", lines[7])

    def test_replicas_and_other_machines_are_named(self):
        devices = [
            (f"{LOCAL}GPU:{2 * i}", f"{WORKER}GPU:{2 * i + 1}") for i in (0, 1)
        ]
        text = "\n".join(self._lines(_plan(), devices, line_length=108))
        for name in ("GPU:0", "GPU:2", "job:worker/task:1/GPU:1"):
            self.assertIn(f"│ {name} ", text)
        self.assertIn("1f1b, 4 microbatches, 2 replicas\n", text)

    def test_an_optimizer_that_was_used_says_how_many_slots_it_has(self):
        plan = _plan()
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        self.assertIn(", 2 optimizer slots", self._lines(plan)[-4])
        optimizer.build([v for v in plan.variables if v.trainable])
        self.assertIn(
            ", 1 optimizer slots", self._lines(plan, optimizer=optimizer)[-4]
        )

    @parameterized.parameters(64, 108, 150)
    def test_table_is_as_wide_as_asked(self, line_length):
        lines = self._lines(_plan(), line_length=line_length)
        self.assertEqual(
            {len(line) for line in lines if line[0] in "┏┃┡│├└"},
            {line_length},
        )
        self.assertLessEqual(max(map(len, lines)), line_length)

    def test_a_layer_that_is_too_large_for_a_stage_is_named(self):
        x = inputs = keras.Input((8,))
        for units in (8, 100, 8):
            x = keras.layers.Dense(units, name=f"of_{units}_{x.name}")(x)
        model = keras.Model(
            inputs, keras.layers.GRU(64, name="gru")(x[:, None])
        )
        lines = self._lines(make_plan(model, one_f_one_b(2, 2), "flops"))
        (line,) = [line for line in lines if line.startswith(" Not cut: gru ")]
        self.assertIn("of the FLOPs, which cannot be cut", line)
        self.assertNotIn("Not cut", _text(_plan()))

    def test_narrow_table_is_refused(self):
        with self.assertRaisesRegex(ValueError, "line_length=63. Use 64"):
            self._lines(_plan(), line_length=63)


class PrintSummaryTest(tf.test.TestCase):
    def test_print_fn_gets_the_text(self):
        self.assertEqual(_text(_plan()), TABLE)

    def test_without_a_terminal_it_prints_the_text(self):
        with mock.patch("sys.stdout", io.StringIO()) as stdout:
            summary.print_summary(_plan(), DEVICES, line_length=77)
        self.assertEqual(
            [line.rstrip() for line in stdout.getvalue().splitlines()],
            TABLE.splitlines(),
        )


class PipelineModelTest(tf.test.TestCase):
    def test_a_trained_pipeline_tells_its_devices_and_slots(self):
        strategy = tfscale.MeshStrategy(tfscale.device_mesh(data=2, pipeline=2))
        with strategy.scope():
            inputs = keras.Input((8,))
            x = keras.layers.Dense(8)(keras.layers.Dense(8)(inputs))
            model = tfscale.PipelineModel(keras.Model(inputs, x), 2)
            model.compile("adam", "mse")
        model.fit(np.ones((8, 8)), np.ones((8, 8)), verbose=0)
        text = _text(
            model._plan, strategy.device_rows, optimizer=model.optimizer
        )
        for name in ("CPU:0", "CPU:1", "CPU:2", "CPU:3"):
            self.assertIn(f"│ {name} ", text)
        self.assertIn(", 2 optimizer slots", text)


if __name__ == "__main__":
    tf.test.main()
