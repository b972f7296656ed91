"""The report of a sharded model, and the warning about lonely layers."""

import re
import warnings

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfscale

LAYERS = keras.layers


def built(build, layouts, data=1, model=2):
    strategy = tfscale.MeshStrategy(
        tfscale.device_mesh(data=data, model=model), layouts
    )
    with strategy.scope():
        return build()


def summary(model, line_length=108):
    lines = []
    tfscale.sharding_summary(model, line_length, lines.append)
    return lines[0]


def cells(text, layer):
    """The cells of a layer's row, each as a list of lines."""
    rows = re.split(r"[├└┡].*[┤┘┩]\n", text)
    (row,) = [r for r in rows if re.match(rf"│ {layer} ", r)]
    lines = [line.split("│")[1:-1] for line in row.splitlines()]
    return [[c.strip() for c in column if c.strip()] for column in zip(*lines)]


def mlp(units=24, activation="relu"):
    x = inputs = keras.Input((12,))
    x = LAYERS.Dense(units, activation=activation, name="up")(x)
    x = LAYERS.Dense(12, name="down")(x)
    return keras.Model(inputs, LAYERS.Dense(4, name="head")(x), name="mlp")


def residual():
    x = inputs = keras.Input((12,))
    y = LAYERS.Dense(24, activation="relu", name="up")(x)
    y = LAYERS.Dense(12, name="down")(y)
    x = LAYERS.Add(name="add")([x, y])
    return keras.Model(inputs, LAYERS.Dense(4, name="head")(x))


def recurrent():
    x = inputs = keras.Input((5, 4))
    return keras.Model(inputs, LAYERS.GRU(8, name="gru")(x))


PAIR = {
    "up/kernel": (None, "model"),
    "up/bias": ("model",),
    "down/kernel": ("model", None),
}


class SummaryTest(tf.test.TestCase, parameterized.TestCase):
    def test_has_a_row_for_each_layer(self):
        text = summary(built(mlp, PAIR))
        layer, variables, exchanged = cells(text, "up")
        self.assertEqual(layer, ["up", "column-parallel", "output sharded"])
        self.assertEqual(
            variables,
            [
                *("kernel (None, model)", "(12, 12), 576.00 B"),
                *("bias (model,)", "(12,), 48.00 B"),
            ],
        )
        exchanged = " ".join(exchanged)
        self.assertEqual(exchanged, "all-reduce of the input's gradient")
        layer, variables, exchanged = cells(text, "down")
        self.assertEqual(layer, ["down", "row-parallel"])
        self.assertEqual(variables[0], "kernel (model, None)")
        self.assertEqual(variables[2], "bias replicated")
        self.assertEqual(" ".join(exchanged), "all-reduce of the output")
        layer, *_, exchanged = cells(text, "head")
        self.assertEqual((layer, exchanged), (["head", "replicated"], []))

    def test_fits_a_terminal_of_80_columns(self):
        # It took 96, and its reasons a line each of any length.
        layouts = {**PAIR, "head/kernel": (None, "model")}
        text = summary(built(mlp, layouts), 76)
        self.assertLessEqual(max(map(len, text.splitlines())), 76)
        layer, variables, exchanged = cells(text, "up")
        self.assertEqual(layer, ["up", "column-parallel", "output sharded"])
        self.assertEqual(
            variables,
            [
                *("kernel (None, model)", "(12, 12), 576.00 B"),
                *("bias (model,)", "(12,), 48.00 B"),
            ],
        )
        self.assertEqual(
            " ".join(exchanged), "all-reduce of the input's gradient"
        )

    @parameterized.parameters(76, 108)
    def test_long_names_of_variables_leave_room_for_the_layer(self, length):
        # The names of experts' weights left five columns for the layer's.
        name = "expert_feedforward_intermediate_dense"

        def build():
            layer = LAYERS.Layer(name="a_layer_of_experts")
            layer.add_weight((4, 8, 16), name=name)
            layer.built = True
            return keras.Sequential([keras.Input((12,)), layer])

        layout = ("model", None, None)
        text = summary(built(build, {f".*{name}": layout}), length)
        self.assertLessEqual(max(map(len, text.splitlines())), length)
        layer, variables, exchanged = cells(text, "a_layer_of_experts")
        self.assertEqual(layer, ["a_layer_of_experts", "gathered"])
        self.assertEqual("".join(variables[:-1]), f"{name} (model, None, None)")
        self.assertEqual(" ".join(exchanged), "all-gather of weights, 1.00 KB")

    def test_adds_up_what_a_device_has(self):
        model = built(mlp, PAIR)
        on_device = sum(
            v.value.values[0].shape.num_elements() * 4 for v in model.variables
        )
        whole = model.count_params() * 4
        text = summary(model)
        self.assertIn(
            f"Bytes per device: {on_device / 1024:.2f} KB of "
            f"{whole / 1024:.2f} KB (ideal for 2 ranks: "
            f"{whole / 2048:.2f} KB)",
            text,
        )
        with model.distribute_strategy.scope():
            model.compile("adam", "mse")
            self.assertNotIn("Optimizer", text + summary(model))
            model.optimizer.build(model.trainable_variables)
        self.assertIn("Optimizer: ", summary(model))

    def test_says_that_weights_are_gathered(self):
        model = built(recurrent, {"gru/gru_cell/kernel": (None, "model")})
        layer, *_, exchanged = cells(summary(model), "gru/gru_cell")
        self.assertEqual(layer, ["gru/gru_cell", "gathered"])
        # Half of 4 x 24 floats.
        self.assertIn("192.00 B", " ".join(exchanged))

    def test_says_why_an_output_is_gathered(self):
        model = built(mlp, {"head/kernel": (None, "model")})
        text = summary(model)
        layer, *_, exchanged = cells(text, "head")
        self.assertEqual(layer[-1], "output gathered")
        self.assertIn("all-gather of the output", " ".join(exchanged))
        self.assertRegex(text, "Gathered, head: (?s:.*) leaves the model")

    def test_says_what_a_layer_itself_needs(self):
        # All of these were said to have an activation that needs the whole.
        def own_call():
            class Model(keras.Model):
                def __init__(self):
                    super().__init__(name="own")
                    self.up = LAYERS.Dense(24, name="up")
                    self.down = LAYERS.Dense(12, name="down")

                def call(self, x):
                    return self.down(self.up(x))

            model = Model()
            model(np.ones((2, 12)))
            return model

        def looked_up():
            x = inputs = keras.Input((5,), dtype="int32")
            x = LAYERS.ReversibleEmbedding(8, 4, name="rows")(x)
            return keras.Model(inputs, LAYERS.Dense(4, name="dense")(x))

        model = built(own_call, {f".*{k}": v for k, v in PAIR.items()})
        model.distribute_strategy.run(model, args=(np.ones((2, 12)),))
        text = summary(model)
        self.assertRegex(text, "Gathered, own/up: it is called by co")
        # Of a row-parallel layer nothing is gathered.
        self.assertNotIn("Gathered, own/down", text)
        text = summary(built(looked_up, {"rows/embeddings": ("model", None)}))
        self.assertNotIn("Gathered", text)
        layer, *_, exchanged = cells(text, "rows")
        self.assertEqual(layer, ["rows", "vocabulary-parallel"])
        self.assertEqual(" ".join(exchanged), "all-reduce of the output")
        text = summary(
            built(
                lambda: mlp(activation="softmax"),
                {"up/kernel": (None, "model")},
            )
        )
        self.assertIn("Gathered, up: its activation 'softmax' needs", text)

    def test_says_which_entries_count_as_replicated(self):
        model = built(mlp, {**PAIR, "head/kernel": ("data", None)})
        self.assertRegex(
            summary(model), "Replicated over the data axis.*: head/kernel"
        )

    def test_embeddings_are_named_by_what_is_sharded(self):
        def build():
            x = inputs = keras.Input((5,), dtype="int32")
            x = LAYERS.Embedding(8, 4, name="rows")(x)
            x = LAYERS.Dense(4, name="dense")(x)
            return keras.Model(inputs, x)

        text = summary(built(build, {"rows/embeddings": ("model", None)}))
        layer, *_, exchanged = cells(text, "rows")
        self.assertEqual(layer, ["rows", "vocabulary-parallel"])
        self.assertEqual(" ".join(exchanged), "all-reduce of the output")

    def test_is_printed_and_changes_nothing(self):
        model = built(mlp, PAIR)
        x = np.ones((4, 12), "float32")
        before = model.predict(x, verbose=0)
        tfscale.sharding_summary(model)
        self.assertAllEqual(model.predict(x, verbose=0), before)

    def on_replicas(self, stage, data):
        """Three kernels of 16 KB, with Adam."""
        strategy = tfscale.MeshStrategy(
            tfscale.device_mesh(data=data), zero_stage=stage
        )
        keras.utils.clear_session(free_memory=False)
        with strategy.scope():
            layers = [LAYERS.Dense(64, use_bias=False) for _ in range(3)]
            model = keras.Sequential([keras.Input((64,)), *layers])
            model.compile("adam", "mse")
            model.optimizer.build(model.trainable_variables)
        return model

    @parameterized.parameters(
        # 2 P (D - 1) / D; the peak is all that there is, a gradient, the part
        # of two others that waits for other replicas, and an update.
        (0, 2, "48.00 KB over 2 replicas\n", "224.01 KB"),
        (1, 4, "72.00 KB over 4 replicas\n", "140.01 KB"),
        (2, 2, "48.00 KB over 2 replicas, half of it in each micro", "168.01"),
        # Of 3 P (D - 1) / D all but what is kept; two are gathered at a time,
        # and gradients do not wait.
        (3, 2, "56.00 KB over 2 replicas, in each microbatch\n", "144.01 KB"),
    )
    def test_says_what_a_replica_sends_and_has(self, stage, data, sent, peak):
        text = summary(self.on_replicas(stage, data))
        self.assertIn(f"Sent by a device in a step: {sent}", text)
        self.assertIn(f"the peak of a step: about {peak}", text)
        kept = "kept for the backward: sequential/dense_1/kernel, sequential/"
        self.assertEqual(kept in text, stage == 3)

    def test_of_no_mesh_is_an_error(self):
        with self.assertRaisesRegex(ValueError, "scope of a .*MeshStrategy"):
            tfscale.sharding_summary(mlp())
        with self.assertRaisesRegex(ValueError, "line_length=20"):
            tfscale.sharding_summary(built(mlp, PAIR), line_length=20)


class WarningTest(tf.test.TestCase, parameterized.TestCase):
    def found(self, model):
        """The warnings of two calls of `predict`."""
        x = np.ones((4, 12), "float32")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.predict(x, verbose=0)
            model.predict(x[:3], verbose=0)
        return [str(w.message) for w in caught if "partner" in str(w.message)]

    def test_of_a_layer_that_nothing_takes_sharded(self):
        model = built(mlp, {"up/kernel": (None, "model")})
        (message,) = self.found(model)
        self.assertRegex(message, "'up' is sharded .* nothing takes .*MatMul")
        self.assertIn("along its inputs", message)

    def test_of_swapped_layers(self):
        model = built(
            residual,
            {"up/kernel": ("model", None), "down/kernel": (None, "model")},
        )
        (message,) = self.found(model)
        self.assertRegex(message, "'up' .* 'down' after it .* swapped")

    @parameterized.named_parameters(
        ("pair", residual, PAIR),
        ("head", mlp, {**PAIR, "head/kernel": (None, "model")}),
        ("only_head", mlp, {"head/kernel": (None, "model")}),
        ("only_row", mlp, {"down/kernel": ("model", None)}),
    )
    def test_is_not_given_of(self, build, layouts):
        self.assertEqual(self.found(built(build, layouts)), [])


if __name__ == "__main__":
    tf.test.main()
