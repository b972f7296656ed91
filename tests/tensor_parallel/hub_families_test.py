"""Families of keras_hub on two model ranks: one step is that of one device.

What is split of each is what `auto_layout_map` finds: nobody wrote a layout for
them. Steps run operation by operation, which is traced in no time.
"""

import warnings

import keras
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized

import tfscale
from tests import same_numbers
from tests.pipeline import hub_families
from tests.pipeline import one_step
from tests.pipeline.keras_hub_test import batch

FAMILIES = (
    "Albert",
    "Bart",
    "Bloom",
    "DistilBert",
    "Falcon",
    "GPTNeoX",
    "Gemma",
    "OPT",
    "Phi3",
    "Qwen3",
    "Roberta",
    "T5",
    "ViT",
)


class HubFamiliesTest(parameterized.TestCase):
    @parameterized.parameters(*FAMILIES)
    @pytest.mark.crossing(every=20)
    def test_one_step(self, family):
        with warnings.catch_warnings():
            # T5 gives masks to a layer of its own that does not know them.
            warnings.filterwarnings("ignore", "(?s).*not support masking")
            # A vocabulary of nine.
            warnings.filterwarnings("ignore", "Replicated on the 2 ranks")
            # A head that is not tied has no part in the backbone.
            warnings.filterwarnings("ignore", "Gradients do not exist")
            self._test_one_step(family)

    def _test_one_step(self, family):
        mesh = tfscale.device_mesh(model=2)
        same_numbers.reset()
        layout_map = tfscale.auto_layout_map(
            lambda: hub_families.build(family), mesh
        )
        with tfscale.MeshStrategy(mesh, layout_map).scope():
            backbone = hub_families.build(family)
        x = batch(backbone, 4)
        sharded = [v for v in backbone.weights if is_sharded(v)]
        self.assertGreater(len(sharded), 2)
        old = [np.array(v) for v in backbone.trainable_variables]
        y, loss, gradients = one_step.on_one_device(backbone, x)
        with backbone.distribute_strategy.scope():
            backbone.compile(
                keras.optimizers.SGD(one_step.RATE),
                keras.tree.map_structure(lambda _: "mse", y),
                run_eagerly=True,
            )
        found = backbone.train_on_batch(x, y, return_dict=True)["loss"]
        np.testing.assert_allclose(found, loss, rtol=1e-5)
        one_step.assert_same(backbone.trainable_variables, old, gradients)


def is_sharded(variable):
    local = variable.value.values[0]
    return local.shape != variable.shape


if __name__ == "__main__":
    absltest.main()
