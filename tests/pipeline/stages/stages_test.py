"""What crosses a cut: each tensor straight from its maker to its users."""

import keras
from absl.testing import absltest

from tfscale.pipeline.stages.graph import flatten_model
from tfscale.pipeline.stages.stages import cut


def dense(name, **options):
    return keras.layers.Dense(4, name=name, **options)


class StagesTest(absltest.TestCase):
    def test_skips_go_straight_to_where_they_are_used(self):
        inputs = keras.Input((4,))
        a = dense("a")(inputs)
        b = dense("b")(a)
        c = dense("c")(b)
        d = keras.layers.Concatenate(name="d")([c, a, inputs])
        graph = flatten_model(keras.Model(inputs, d))
        a, b, c, d = (call.outputs[0] for call in graph.calls)
        first, second, third, fourth = cut(graph, (1, 2, 3))
        self.assertEqual(first.inputs, graph.inputs)
        self.assertEqual(first.outputs, (a,))
        self.assertEqual((second.inputs, second.outputs), ((a,), (b,)))
        self.assertEqual((third.inputs, third.outputs), ((b,), (c,)))
        self.assertEqual(fourth.inputs, (c, a, *graph.inputs))
        self.assertEqual(fourth.outputs, (d,))

    def test_the_last_stage_gets_and_gives_all_outputs(self):
        inputs = keras.Input((4,))
        early = dense("early")(inputs)
        late = dense("late")(dense("b")(early))
        graph = flatten_model(keras.Model(inputs, [early, late, inputs]))
        early, _, late = (call.outputs[0] for call in graph.calls)
        *_, last = cut(graph, (1, 2))
        self.assertContainsSubset([early, *graph.inputs], last.inputs)
        self.assertEqual(last.outputs, (early, late, *graph.inputs))

    def test_a_layer_of_two_stages_has_its_variables_in_both(self):
        inputs = keras.Input((4,))
        tied = dense("tied")
        model = keras.Model(inputs, tied(dense("b")(tied(inputs))))
        first, second, third = cut(flatten_model(model), (1, 2))
        self.assertEqual(
            list(map(id, first.variables)), list(map(id, third.variables))
        )
        self.assertLen(second.variables, 2)
        self.assertEqual(first.layers, third.layers)

    def test_a_variable_is_there_once_however_often_it_is_used(self):
        inputs = keras.Input((4,))
        twice = dense("twice")
        model = keras.Model(inputs, twice(twice(inputs)))
        (stage,) = cut(flatten_model(model), ())
        self.assertLen(stage.variables, 2)
        self.assertLen(stage.calls, 2)
        self.assertEqual(stage.layers, ["twice"])

    def test_what_is_frozen_or_never_trained_is_state(self):
        inputs = keras.Input((4,))
        x = dense("frozen", trainable=False)(inputs)
        x = keras.layers.Dropout(0.5)(x)
        x = keras.layers.BatchNormalization(name="norm")(x)
        (stage,) = cut(flatten_model(keras.Model(inputs, x)), ())
        self.assertEqual(
            [v.path.split("/")[-1] for v in stage.trainable],
            ["gamma", "beta"],
        )
        self.assertCountEqual(
            [v.path.split("/")[-1] for v in stage.state],
            [
                "kernel",
                "bias",
                "seed_generator_state",
                "moving_mean",
                "moving_variance",
            ],
        )


if __name__ == "__main__":
    absltest.main()
