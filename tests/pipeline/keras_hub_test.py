"""Families of keras_hub, as small as they can be, train a step as pipelines.

What they have in common is that each was written for one device by somebody
else: nested models, tied embeddings, masks, several inputs and outputs, a
None where a layer promised a tensor. Loss and gradients have to be those of one
device, to rounding.
"""

import os
import warnings

import keras
import keras_hub
import numpy as np
import pytest
from absl.testing import parameterized

import tfscale
from tests import same_numbers
from tests.pipeline import hub_families
from tests.pipeline import one_step

# Of what has a size that is not given.
LENGTHS = dict(Moonshine=1024)  # samples of a sound


def batch(model, length):
    """Four rows for a model."""
    random = np.random.RandomState(0)

    def rows(tensor):
        shape = [4, *(length if n is None else n for n in tensor.shape[1:])]
        if "mask" in tensor.name:
            return np.ones(shape, "int32")
        if "int" in str(tensor.dtype):
            return random.randint(
                1, 2 if "segment" in tensor.name else 9, shape
            )
        return random.normal(size=shape).astype("float32")

    return keras.tree.map_structure(rows, model.input)


def families():
    """Those that are tried: all but the dearest, or all of them."""
    dear = hub_families.DEAR
    if os.environ.get("TFSCALE_HUB_FAMILIES") == "all":
        dear = ()
    return [family for family in hub_families.FAMILIES if family not in dear]


class KerasHubTest(parameterized.TestCase):
    def test_every_backbone_is_in_a_table(self):
        # So that a new one is noticed.
        known = {*hub_families.FAMILIES, *hub_families.UNTRIED}
        public = {
            name.removesuffix("Backbone") or name: kind
            for name, kind in vars(keras_hub.models).items()
            if name.endswith("Backbone")
        }
        self.assertContainsSubset(known, public)
        kinds = {public[family] for family in known}
        # Some have two names.
        others = {name for name, kind in public.items() if kind not in kinds}
        self.assertEmpty(others.difference(hub_families.UNRELEASED))

    @parameterized.parameters(*families())
    @pytest.mark.crossing(every=64)
    def test_one_step(self, family):
        with warnings.catch_warnings():
            # T5 gives masks to a layer of its own that does not know them.
            warnings.filterwarnings("ignore", "(?s).*not support masking")
            # Flux leaves a `build` to its layers.
            warnings.filterwarnings("ignore", r"`build\(\)` was called")
            # A head that is not tied has no part in the backbone.
            warnings.filterwarnings("ignore", "Gradients do not exist")
            self._test_one_step(family)

    def _test_one_step(self, family):
        same_numbers.reset()
        strategy = tfscale.MeshStrategy(tfscale.device_mesh(pipeline=2))
        with strategy.scope():
            backbone = hub_families.build(family)
        x = batch(backbone, LENGTHS.get(family, 4))
        old = [np.array(v) for v in backbone.trainable_variables]
        y, loss, gradients = one_step.on_one_device(backbone, x)
        with strategy.scope():
            model = tfscale.PipelineModel(
                backbone,
                1 if family in hub_families.ACROSS_ROWS else 2,
                balance="params",
            )
            model.compile(
                keras.optimizers.SGD(one_step.RATE),
                keras.tree.map_structure(
                    lambda wanted: None if wanted.dtype == bool else "mse", y
                ),
            )
            # Less to trace than what Keras builds it all with.
            model.compute_loss(y=y, y_pred=y)
            model.optimizer.build(model.trainable_variables)
        found = model.train_on_batch(x, y, return_dict=True)["loss"]
        np.testing.assert_allclose(found, loss, rtol=1e-5)
        one_step.assert_same(backbone.trainable_variables, old, gradients)
