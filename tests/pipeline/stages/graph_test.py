"""A model as calls: in an order that runs, opened up, the same function."""

import keras
import numpy as np
from absl.testing import parameterized

from tests.pipeline import same_numbers_models_test as models
from tfscale._internals import attributes
from tfscale.pipeline.stages.graph import flatten_model
from tfscale.pipeline.stages.plan import make_plan
from tfscale.schedules.named_schedules import one_f_one_b


def run(graph, x):
    """Runs the calls one after the other, each value made before its use."""
    tensors = dict(zip(graph.inputs, graph.flatten_inputs(x)))
    for call in graph.calls:
        call.run(tensors, training=False)
    return graph.pack_outputs([tensors[value] for value in graph.outputs])


def names(model):
    return [call.name for call in flatten_model(model).calls]


class GraphTest(parameterized.TestCase):
    @parameterized.named_parameters((name, name) for name in models.MODELS)
    def test_calls_are_the_model(self, name):
        build, data, *_ = models.MODELS[name]
        model = build()
        x = keras.tree.map_structure(lambda x: x[:4], data["x"])
        keras.tree.map_structure(
            np.testing.assert_array_equal,
            run(flatten_model(model), x),
            model(x, training=False),
        )

    def test_nested_models_are_opened(self):
        self.assertEqual(
            names(models.nested_models()),
            [
                "a",
                "inner",
                "add",
                "add_1",
                "inner",
                "add",
                "multiply",
                "h1",
                "h2",
            ],
        )

    def test_models_of_keras_hub_are_opened(self):
        found = names(models.language_model())
        self.assertEqual(found[0], "token_embedding")
        self.assertEqual(found[-1], "token_embedding")
        self.assertIn("transformer_layer_1", found)

    def test_parallel_branches_follow_each_other(self):
        # They came interleaved, by depth, and no cut was between them.
        model = models.flat_branches()
        model = keras.Model(model.inputs, model.get_layer("join").output)
        branches = [[f"b{b}_{i}" for i in range(3)] for b in range(2)]
        self.assertEqual(names(model), [*branches[0], *branches[1], "join"])
        plan = make_plan(model, one_f_one_b(2, 1), "flops")
        self.assertEqual(plan.stages[0].layers, branches[0])
        # Only the result of the branch goes to the other stage.
        self.assertLen(plan.stages[1].inputs, 2)
        self.assertIn(plan.graph.inputs[0], plan.stages[1].inputs)

    def test_calls_of_one_layer_stay_in_their_order(self):
        # Keras calls it on the short branch first, at the same depth.
        x = keras.Input((4,))
        shared = keras.layers.Dense(4, name="shared")
        a = shared(keras.layers.Dense(4, name="a")(x))
        b = keras.layers.Dense(4, name="b")(x)
        b = shared(keras.layers.Dense(4, name="b_1")(b))
        model = keras.Model(x, [keras.layers.Dense(4, name="a_1")(a), b])
        graph = flatten_model(model)
        ours = [
            id(graph.specs[call.outputs[0]])
            for call in graph.calls
            if call.operation is shared
        ]
        by_keras = [
            id(node.outputs[0])
            for node in attributes.nodes_of(model)
            if node.operation is shared
        ]
        self.assertEqual(ours, by_keras)

    def test_sequential_models_are_opened(self):
        layers = [keras.layers.Dense(2, name=name) for name in "ab"]
        model = keras.Sequential([keras.Input((2,)), *layers])
        self.assertEqual(names(model), ["a", "b"])
        self.assertEqual(run(flatten_model(model), np.ones((3, 2))).shape[0], 3)

    def test_inputs_in_another_dtype_or_with_a_mask_are_prepared(self):
        inner_input = keras.Input((5, 4), dtype="float16", name="inner_input")
        inner = keras.Model(
            inner_input, keras.layers.LSTM(3, name="lstm")(inner_input)
        )
        inner.supports_masking = True
        tokens = keras.Input((5,), dtype="int32")
        x = keras.layers.Embedding(9, 4, mask_zero=True, name="e")(tokens)
        model = keras.Model(tokens, inner(x))
        graph = flatten_model(model)
        self.assertContainsSubset(
            ["e", "inner_input", "lstm"], [call.name for call in graph.calls]
        )
        np.testing.assert_array_equal(
            run(graph, models.PADDED), model(models.PADDED)
        )

    def test_a_nested_model_whose_inputs_keras_rearranges_is_one_call(self):
        inner_input = keras.Input((4,))
        inner = keras.Model(
            inner_input, keras.layers.Dense(2)(inner_input), name="inner"
        )
        inputs = keras.Input((4, 1))
        model = keras.Model(inputs, inner(inputs))
        self.assertEqual(names(model), ["inner"])
        x = np.ones((3, 4, 1))
        np.testing.assert_array_equal(run(flatten_model(model), x), model(x))

    def test_variables_are_those_of_the_model(self):
        for build in (models.nested_models, models.tied_layers):
            model = build()
            found = {
                id(v)
                for call in flatten_model(model).calls
                for v in call.variables
            }
            self.assertEqual(found, {id(v) for v in model.variables})
