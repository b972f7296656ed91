"""Losses of microbatches and their divisors make the loss of the batch."""

import keras
import numpy as np
from absl.testing import parameterized

from tests import same_numbers
from tfscale._internals import symbols
from tfscale.step.losses import compiled_losses

RANDOM = np.random.RandomState(0)
LABELS = RANDOM.randint(0, 3, (9, 4))
LOGITS = RANDOM.normal(size=(9, 4, 3)).astype("float32")
WEIGHTS = RANDOM.uniform(0.0, 2.0, (9, 4)).astype("float32")
# No row of the second microbatch counts at all.
MASK = np.arange(4) < np.array([1, 4, 2, 0, 0, 0, 3, 4, 1])[:, None]
SIZES = (slice(0, 3), slice(3, 6), slice(6, 7), slice(7, 9))


def crossentropy(**options):
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, **options
    )


def compile_loss(model_outputs=None, **options):
    """What Keras makes of the arguments of `compile`."""
    inputs = keras.Input((1,))
    layers = [keras.layers.Dense(1, name=n) for n in model_outputs or ["o"]]
    outputs = [layer(inputs) for layer in layers]
    model = keras.Model(inputs, outputs if model_outputs else outputs[0])
    model.compile(**options)
    return model._compile_loss


def masked(logits, part):
    tensor = keras.ops.convert_to_tensor(logits[part])
    symbols.set_keras_mask(tensor, keras.ops.convert_to_tensor(MASK[part]))
    return tensor


def combine(parts):
    """The formula of the module."""
    losses = []
    for each in zip(*parts):
        values = np.array([float(x.value) for x in each])
        divisors = np.array([float(x.divisor) for x in each])
        if each[0].is_sum:
            losses.append(values.sum())
        else:
            values = np.where(divisors == 0, 0, values)
            losses.append((values * divisors).sum() / divisors.sum())
    return losses


class LossesTest(parameterized.TestCase):
    @parameterized.product(
        reduction=(
            "sum_over_batch_size",
            "mean",
            "sum",
            "mean_with_sample_weight",
        ),
        with_mask=(False, True),
        weighted=(False, True),
        ignore_class=(None, 1),
    )
    def test_of_one_output(self, reduction, with_mask, weighted, ignore_class):
        loss = compile_loss(
            loss=crossentropy(reduction=reduction, ignore_class=ignore_class)
        )

        def arguments(part):
            logits = masked(LOGITS, part) if with_mask else LOGITS[part]
            return LABELS[part], logits, WEIGHTS[part] if weighted else None

        expected = loss(*arguments(slice(None)))
        parts = [compiled_losses(loss, *arguments(part)) for part in SIZES]
        same_numbers.assert_close(combine(parts), [expected])

    def test_of_several_outputs_with_weights(self):
        loss = compile_loss(
            ["left", "right"],
            loss=[crossentropy(), "mae"],
            loss_weights=[0.3, 2.0],
        )
        targets = LOGITS[..., 0]

        def arguments(part):
            return (
                [LABELS[part], targets[part]],
                [masked(LOGITS, part), LOGITS[part, :, 1]],
                [WEIGHTS[part], WEIGHTS[part, 0]],
            )

        expected = loss(*arguments(slice(None)))
        # Its trackers of single losses are for the whole batch alone.
        tracked = [float(m.result()) for m in loss.metrics]
        parts = [compiled_losses(loss, *arguments(part)) for part in SIZES]
        self.assertEqual([x.weight for x in parts[0]], [0.3, 2.0])
        found = combine(parts)
        same_numbers.assert_close(found, tracked)
        same_numbers.assert_close(np.dot([0.3, 2.0], found), expected)
        self.assertEqual([float(m.result()) for m in loss.metrics], tracked)

    def test_a_function_is_a_mean_over_rows(self):
        loss = compile_loss(loss=lambda y, p: keras.ops.mean((y - p) ** 2, -1))
        y, p = LOGITS[..., 0], LOGITS[..., 1]
        expected = loss(y, p)
        parts = [compiled_losses(loss, y[s], p[s], None) for s in SIZES]
        same_numbers.assert_close(combine(parts), [expected])

    def test_without_a_loss_there_is_none(self):
        self.assertEqual(compiled_losses(None, None, LOGITS, None), ())

    def test_the_losses_of_compile_are_left_as_they_were(self):
        loss = compile_loss(loss=crossentropy())
        loss(LABELS, LOGITS)
        before = list(loss._flat_losses)
        compiled_losses(loss, LABELS, LOGITS, None)
        self.assertEqual(loss._flat_losses, before)
        with self.assertRaisesRegex(ValueError, "must have the same shape"):
            compiled_losses(loss, LABELS[:, :2], LOGITS, None)
        self.assertEqual(loss._flat_losses, before)
        self.assertNotIn("call", vars(before[0].loss))
