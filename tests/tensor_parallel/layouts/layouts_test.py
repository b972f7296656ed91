import types

import keras
import keras_hub
from absl.testing import absltest
from absl.testing import parameterized

import tfscale
from tfscale.tensor_parallel.layouts.layouts import Layouts


def mesh(**axes):
    """All of a mesh that layouts look at."""
    return types.SimpleNamespace(
        axis_names=tuple(axes), shape=tuple(axes.values())
    )


class SplitDimTest(parameterized.TestCase):
    @parameterized.parameters(
        # layout_map, path, shape, dim
        ({"up/kernel": (None, "model")}, "up/kernel", (4, 8), 1),
        ({".*kernel": ("model", None)}, "a/b/kernel", (4, 8), 0),
        ({".*kernel": (None, None)}, "up/kernel", (3, 5), None),
        ({".*kernel": ("data", None)}, "up/kernel", (3, 5), None),
        ({".*kernel": ("data", "model")}, "up/kernel", (3, 8), 1),
        ({".*kernel": [None, "model", None]}, "q/kernel", (3, 8, 5), 1),
        ({".*bias": ("model",)}, "up/kernel", (3, 5), None),
        # The whole path must match, as in Keras.
        ({"kernel": (None, "model")}, "up/kernel", (4, 8), None),
        ({"up": (None, "model")}, "up/kernel", (4, 8), None),
        # The path itself as a key comes first.
        (
            {".*kernel": (None, "model"), "up/kernel": ("model", None)},
            "up/kernel",
            (4, 8),
            0,
        ),
        ({}, "up/kernel", (4, 8), None),
    )
    def test_dim_that_the_layout_names(self, layout_map, path, shape, dim):
        layouts = Layouts(layout_map, mesh(data=2, pipeline=1, model=4))
        self.assertEqual(layouts.split_dim(path, shape), dim)

    def test_matches_what_keras_matches(self):
        layout_map = keras.distribution.LayoutMap(None)
        layout_map["up/kernel"] = ("model", None)
        layout_map[".*kernel"] = (None, "model")
        layout_map["(up|down).bias"] = ("model",)
        layout_map["^out/ke.nel$"] = ("model", None)
        layout_map["b"] = ("model",)
        layouts = Layouts(layout_map, mesh(model=2))
        for path in (
            "up/kernel",
            "down/kernel",
            "x/up/kernel",
            "up/bias",
            "x/up/bias",
            "up/bias_1",
            "b",
            "bb",
            "up/b",
        ):
            of_keras = layout_map[path]
            axes = None if of_keras is None else of_keras.axes
            shape = (2,) * len(axes or (1,))
            self.assertEqual(
                layouts.split_dim(path, shape),
                axes and axes.index("model"),
                path,
            )
        # Two patterns match here, which Keras takes for a mistake as well.
        with self.assertRaises(ValueError):
            layout_map["out/kernel"]
        with self.assertRaises(ValueError):
            layouts.split_dim("out/kernel", (2, 2))

    def test_slots_of_an_optimizer_match_no_pattern_for_a_kernel(self):
        layouts = Layouts({"up/kernel": (None, "model")}, mesh(model=2))
        self.assertIsNone(layouts.split_dim("adam/up_kernel_momentum", (3, 3)))

    def test_data_axis_is_ignored_and_said(self):
        layouts = Layouts(
            {"up/.*": ("data", "model"), "down/.*": ("model", None)},
            mesh(data=2, model=2),
        )
        layouts.split_dim("up/kernel", (3, 4))
        layouts.split_dim("up/kernel", (3, 4))
        layouts.split_dim("down/kernel", (4, 3))
        self.assertEqual(layouts.ignored, ("up/kernel",))

    def test_model_axis_of_size_one_replicates_whatever_the_map_says(self):
        layouts = Layouts(
            {"(": ("model", "model"), "up/kernel": ("nowhere",)},
            mesh(data=2, model=1),
        )
        self.assertIsNone(layouts.split_dim("up/kernel", (3, 5)))
        self.assertEqual(layouts.unmatched(), [])
        layouts.check_all_matched(["down/kernel"])

    def test_a_name_with_another_number_is_explained(self):
        # The model was built twice, and the map is of the first one.
        mesh = tfscale.device_mesh(model=2)
        layouts = Layouts({"^dense/kernel$": (None, "model")}, mesh)
        with self.assertRaisesRegex(
            ValueError,
            "matches 'dense_2/kernel' but for a number.*clear_session",
        ):
            layouts.check_all_matched(["up/kernel", "dense_2/kernel"])

    def test_map_of_another_mesh_counts_by_its_names(self):
        # Written for eight devices of Keras on JAX, and no pipeline.
        layout_map = keras.distribution.LayoutMap(
            keras.distribution.DeviceMesh(
                (2, 4), ("data", "model"), [f"cpu:{i}" for i in range(8)]
            )
        )
        layout_map[".*kernel"] = ("data", "model")
        layouts = Layouts(layout_map, tfscale.device_mesh(model=2))
        # Six columns: two ranks divide them, the four of that mesh would not.
        self.assertEqual(layouts.split_dim("up/kernel", (3, 6)), 1)


class ErrorsTest(parameterized.TestCase):
    @parameterized.parameters(
        # layout, what the message says
        (("batch", "model"), "'batch'.*axes 'data', 'pipeline', 'model'"),
        (("pipeline", None), "not 'pipeline'.*Received: 'pipeline' in .*'w'"),
        (("model", "model"), "'model' at most once.*'w'"),
        (
            (("data", "model"), None),
            r"one axis.*: \('data', 'model'\) in .*'w'",
        ),
    )
    def test_axes_are_checked_at_once(self, layout, message):
        with self.assertRaisesRegex(ValueError, message):
            Layouts({"w": layout}, mesh(data=1, pipeline=1, model=2))

    def test_mesh_without_a_model_axis(self):
        with self.assertRaisesRegex(ValueError, "'model' in .*axes 'data'"):
            Layouts({"w": (None, "model")}, mesh(data=2))

    def test_layout_of_a_wrong_type(self):
        with self.assertRaisesRegex(TypeError, "TensorLayout.*'model'.*'w'"):
            Layouts({"w": "model"}, mesh(model=2))

    def test_key_that_is_no_regular_expression(self):
        with self.assertRaisesRegex(ValueError, r"'\*kernel': nothing to"):
            Layouts({"*kernel": (None, "model")}, mesh(model=2))

    def test_several_patterns_match(self):
        layouts = Layouts(
            {".*kernel": (None, "model"), "up.*": ("model", None)},
            mesh(model=2),
        )
        with self.assertRaisesRegex(
            ValueError, r"'up/kernel'.*'\.\*kernel', 'up\.\*'"
        ):
            layouts.split_dim("up/kernel", (4, 4))

    @parameterized.parameters((("model",),), ((None, "model", None),))
    def test_rank_differs(self, layout):
        layouts = Layouts({"up/kernel": layout}, mesh(model=2))
        with self.assertRaisesRegex(
            ValueError,
            rf"{len(layout)}, for 'up/kernel' of shape \(4, 8\), with 2",
        ):
            layouts.split_dim("up/kernel", (4, 8))

    def test_axis_does_not_divide(self):
        layouts = Layouts({".*kernel": (None, "model")}, mesh(model=4))
        with self.assertRaisesRegex(
            ValueError,
            r"'head/kernel' of shape \(8, 10\) .*dim 1 has size 10.* size 4\. "
            r"Use a model axis of 1, 2, 5, 10, or a dim of 12",
        ):
            layouts.split_dim("head/kernel", (8, 10))


class MatchedTest(absltest.TestCase):
    def test_patterns_that_matched_nothing_so_far(self):
        layouts = Layouts(
            {"up/.*": (None, "model"), "down/.*": ("model", None)},
            mesh(model=2),
        )
        self.assertEqual(layouts.unmatched(), ["up/.*", "down/.*"])
        layouts.split_dim("up/kernel", (2, 2))
        self.assertEqual(layouts.unmatched(), ["down/.*"])
        layouts.split_dim("down/kernel", (2, 2))
        layouts.check_all_matched([])

    def test_message_names_what_may_have_been_meant(self):
        layouts = Layouts(
            {
                "blok_0/up/kernel": (None, "model"),
                "kernel": (None, "model"),
                "elsewhere/.*": (None, "model"),
                "block_0/down/kernel": ("model", None),
            },
            mesh(model=2),
        )
        layouts.split_dim("block_0/down/kernel", (2, 2))
        variables = [
            types.SimpleNamespace(path=path)
            for path in (
                "embedding/embeddings",
                "block_0/up/kernel",
                "elsewhere/kernel",
            )
        ]
        with self.assertRaises(ValueError) as caught:
            layouts.check_all_matched(variables)
        message = str(caught.exception)
        self.assertRegex(
            message, r"'blok_0/up/kernel' \(nearest: 'block_0/up/kernel'"
        )
        self.assertRegex(
            message, r"'kernel' \(.*only a part of 'block_0/up/kernel'"
        )
        self.assertRegex(
            message, r"'elsewhere/\.\*' \(.*'elsewhere/kernel', which was not"
        )
        self.assertNotIn("down", message)


class KerasHubTest(absltest.TestCase):
    def _layouts(self, backbone, **axes):
        device_mesh = tfscale.device_mesh(**axes)
        layouts = Layouts(
            backbone.get_layout_map(device_mesh, data_parallel_dim_name="data"),
            device_mesh,
        )
        dims = {
            v.path: dim
            for v in backbone.variables
            if (dim := layouts.split_dim(v.path, v.shape)) is not None
        }
        return layouts, dims

    def test_llama(self):
        backbone = keras_hub.models.LlamaBackbone(
            vocabulary_size=50,
            num_layers=1,
            num_query_heads=4,
            num_key_value_heads=2,
            hidden_dim=8,
            intermediate_dim=16,
        )
        layouts, dims = self._layouts(backbone, data=2, model=2)
        block = "transformer_layer_0"
        # Its map divides queries, keys and values on the dim that they are
        # contracted on, which is not that of the heads.
        self.assertEqual(
            dims,
            {
                "token_embedding/embeddings": 0,
                f"{block}/self_attention/query/kernel": 0,
                f"{block}/self_attention/key/kernel": 0,
                f"{block}/self_attention/value/kernel": 0,
                f"{block}/self_attention/attention_output/kernel": 0,
                f"{block}/feedforward_intermediate_dense/kernel": 1,
                f"{block}/feedforward_gate_dense/kernel": 1,
                f"{block}/feedforward_output_dense/kernel": 0,
            },
        )
        # Its maps shard over the replicas as well, all that they divide.
        self.assertEqual(layouts.ignored, tuple(dims))
        layouts.check_all_matched(backbone.variables)

    def test_gemma_with_fewer_key_heads_than_ranks(self):
        backbone = keras_hub.models.GemmaBackbone(
            vocabulary_size=50,
            num_layers=1,
            num_query_heads=4,
            num_key_value_heads=1,
            hidden_dim=8,
            intermediate_dim=16,
            head_dim=4,
        )
        with self.assertRaisesRegex(
            ValueError, r"attention/key/kernel' of shape \(1, 8, 4\).*None"
        ):
            self._layouts(backbone, model=2)

    def test_names_of_another_mesh(self):
        device_mesh = keras.distribution.DeviceMesh(
            (1, 2), ("batch", "model"), ["cpu:0", "cpu:1"]
        )
        layout_map = keras_hub.models.LlamaBackbone.get_layout_map(device_mesh)
        with self.assertRaisesRegex(
            ValueError, "'batch'.*data_parallel_dim_name"
        ):
            Layouts(layout_map, tfscale.device_mesh(model=2))


if __name__ == "__main__":
    absltest.main()
