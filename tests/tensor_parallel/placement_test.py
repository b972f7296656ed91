"""Each shard is on its rank's device, and nothing whole ever is."""

import collections

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers
from tests.tensor_parallel import same_numbers_test


def device_number(variable):
    return int(variable.device.rsplit(":", 1)[1])


def built_with_log(data, model):
    """An MLP with its optimizer, and every variable that was asked for."""
    mesh = tfscale.device_mesh(data=data, model=model)
    layout_map = tfscale.auto_layout_map(same_numbers_test.mlp(), mesh)
    keras.utils.clear_session(free_memory=False)
    made = []

    def log(next_creator, **kwargs):
        variable = next_creator(**kwargs)
        made.append(variable)
        return variable

    # The outermost creator sees what the strategy asks for, component by
    # component.
    strategy = tfscale.MeshStrategy(mesh, layout_map)
    with strategy.scope(), tf.variable_creator_scope(log):
        mlp = same_numbers_test.mlp()
        mlp.compile(keras.optimizers.Adam(0.01), "mse")
        mlp.optimizer.build(mlp.trainable_variables)
    return mlp, made


class PlacementTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*same_numbers_test.SIZES)
    def test_components(self, data, model):
        mlp, _ = built_with_log(data, model)
        ranks = data * model
        expected = {
            "kernel": {"up": (12, 24 // model), "down": (24 // model, 12)},
            "bias": {"up": (24 // model,), "down": (12,)},
        }
        slots = collections.defaultdict(list)
        for slot in mlp.optimizer.variables[2:]:
            slots[slot.path.split("/", 1)[1]].append(slot)
        for variable in mlp.trainable_variables:
            layer, name = variable.path.split("/")
            shape = expected[name][layer.split("_")[0]]
            own = [
                slot
                for path, found in slots.items()
                if path.startswith(f"{layer}_{name}_")
                for slot in found
            ]
            self.assertLen(own, 2)
            for each in (variable, *own):
                components = each.value.values
                self.assertEqual(
                    [tuple(c.shape) for c in components], [shape] * ranks
                )
                self.assertEqual(
                    [device_number(c) for c in components], list(range(ranks))
                )

    @parameterized.parameters((1, 4), (2, 2))
    def test_no_whole_copy_of_what_is_sharded_is_made(self, data, model):
        mlp, made = built_with_log(data, model)
        sharded = {
            (tuple(v.shape), v.path.split("/")[1])
            for v in mlp.variables
            if tuple(v.value.values[0].shape) != tuple(v.shape)
        }
        self.assertLen(sharded, 3)
        components = [
            component
            for variable in made
            for component in getattr(variable, "values", [variable])
        ]
        # Weights, two slots, what else an optimizer and metrics have.
        self.assertGreater(len(components), 3 * 8 * data * model)
        whole = {shape for shape, _ in sharded}
        for component in components:
            self.assertNotIn(tuple(component.shape), whole, component.name)

    def test_a_device_has_its_share_of_bytes(self):
        def build():
            inputs = keras.Input((32,))
            x = keras.layers.Dense(256, "relu", name="up")(inputs)
            return keras.Model(inputs, keras.layers.Dense(32, name="down")(x))

        job = same_numbers.Job(
            build,
            dict(x=np.ones((8, 32), "float32"), y=np.ones((8, 32), "float32")),
            optimizer=lambda: keras.optimizers.Adam(0.01),
        )
        model = same_numbers.on_ranks(job, 4).model
        held = collections.Counter()
        whole = 0
        for variable in model.variables + model.optimizer.variables:
            if "up" in variable.path or "down_kernel" in variable.path.replace(
                "/", "_"
            ):
                whole += np.array(variable).nbytes
                for component in variable.value.values:
                    held[component.device] += component.numpy().nbytes
        self.assertLen(held, 4)
        for found in held.values():
            self.assertEqual(found, whole / 4)


if __name__ == "__main__":
    tf.test.main()
