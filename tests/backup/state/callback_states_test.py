"""What a backup keeps of Keras' callbacks, and what stays the program's."""

import keras
from absl.testing import absltest
from absl.testing import parameterized

from tfscale.backup.state import callback_states

_CALLBACKS = keras.callbacks


class CallbackStatesTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("tensorboard", _CALLBACKS.TensorBoard, "profile_batch", 0, (10, 20)),
        ("checkpoint", _CALLBACKS.ModelCheckpoint, "save_freq", 5, 7),
        ("early_stopping", _CALLBACKS.EarlyStopping, "patience", 1, 3),
        ("plateau", _CALLBACKS.ReduceLROnPlateau, "patience", 1, 3),
        ("averages", _CALLBACKS.SwapEMAWeights, "swap_on_epoch", False, True),
    )
    def test_an_argument_may_change_at_a_restart(
        self, kind, argument, before, now
    ):
        path = [self.create_tempdir().full_path + "/{epoch}.keras"]
        path *= kind in (_CALLBACKS.TensorBoard, _CALLBACKS.ModelCheckpoint)
        saved, restored, expected = (
            kind(*path, **{argument: value}) for value in (before, now, now)
        )
        callback_states.set_state(restored, callback_states.state_of(saved))
        for name, value in vars(expected).items():
            if isinstance(value, (bool, int, float, str)):
                with self.subTest(name):
                    self.assertEqual(getattr(restored, name), value)


if __name__ == "__main__":
    absltest.main()
