"""What pipelines rely on in the trainer of Keras."""

import keras
import numpy as np
import tensorflow as tf

from tests._internals.contracts import holds
from tests._internals.contracts import recording
from tfscale._internals import attributes

X = np.ones((4, 2), "float32")


def model_of(kind=keras.Model):
    x = keras.Input((2,))
    a = keras.layers.Dense(1, name="a")(x)
    b = keras.layers.Dense(1, name="b")(x)
    model = kind(inputs=x, outputs=[a, b])
    model.compile(
        "sgd",
        ["mse", "mae"],
        loss_weights=[1.0, 2.0],
        metrics=[["mae"], []],
        run_eagerly=True,
    )
    return model


class TrainerTest(tf.test.TestCase):
    @holds("Model.compile", "_compile_loss", "_compile_metrics")
    @holds("Model._maybe_symbolic_build", "_symbolic_build")
    def test_what_compile_made_is_built_of_a_batch_and_changes_nothing(self):
        model = model_of()
        parts = (model._compile_loss, model._compile_metrics)
        for part in parts:
            self.assertFalse(part.built)
        before = model.get_weights()
        model._symbolic_build(data_batch=(X, [X[:, :1], X[:, :1]]))
        for part in (*parts, model.optimizer):
            self.assertTrue(part.built)
        self.assertAllEqual(model.get_weights()[0], before[0])
        tracker = model.metrics[0]
        self.assertIs(tracker, model._loss_tracker)
        self.assertEqual(tracker.name, "loss")
        # A metric for each of several losses.
        self.assertLen(model._compile_loss.metrics, 2)

    @holds("MeanMetricWrapper.__init__", "_fn", "_fn_kwargs")
    def test_a_metric_takes_the_mean_of_what_its_function_returns(self):
        def scaled(y, y_pred, scale):
            return (y - y_pred) * scale

        metric = keras.metrics.MeanMetricWrapper(scaled, scale=2.0)
        self.assertIs(metric._fn, scaled)
        self.assertEqual(metric._fn_kwargs, {"scale": 2.0})
        metric.update_state(np.array([3.0, 5.0]), np.ones(2))
        self.assertEqual(metric.result(), 6.0)
        # A weight of one number is that of a call.
        keras.metrics.Mean.update_state(metric, 9.0, 0.5)
        self.assertEqual(metric.result(), (4.0 + 8.0 + 4.5) / 2.5)

    @holds("Model.compile", "_compile_config")
    def test_what_compile_was_called_with_is_kept(self):
        model = model_of()
        found = model._compile_config.config
        self.assertEqual(found["loss_weights"], [1.0, 2.0])
        self.assertEqual(
            model.get_compile_config(),
            model._compile_config.serialize(),
        )

    @holds("KerasSaveable", "_obj_type")
    def test_what_kind_of_object_is_saved_is_asked_by_one_method(self):
        for make in (keras.Sequential, lambda: model_of()):
            self.assertIn(make()._obj_type(), ("Sequential", "Functional"))
        calls = []
        kind = recording(keras.Sequential, ("_obj_type",), calls)
        model = kind([keras.Input((2,)), keras.layers.Dense(1)])
        model.save_weights(self.get_temp_dir() + "/model.weights.h5")
        self.assertNotEmpty(calls)

    @holds("saving_options.keras_option_scope", "use_legacy_config")
    def test_an_hdf5_file_asks_for_a_configuration_of_the_old_format(self):
        seen = []

        class Asked(keras.Sequential):
            def get_config(self):
                seen.append(attributes.writes_old_format())
                return super().get_config()

        model = Asked([keras.Input((2,)), keras.layers.Dense(1)])
        path = self.get_temp_dir() + "/model"
        model.save(path + ".keras")
        keras.saving.save_model(model, path + ".h5")
        self.assertEqual((seen[0], seen[-1]), (False, True))

    @holds("Model.fit", "_maybe_symbolic_build")
    def test_what_is_left_to_build_is_built_once_before_the_first_step(self):
        calls = []
        kind = recording(
            keras.Sequential, ("_maybe_symbolic_build", "train_step"), calls
        )
        model = kind([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        model.fit(X, X[:, :1], batch_size=2, verbose=0)
        self.assertEqual(
            calls, ["_maybe_symbolic_build", "train_step", "train_step"]
        )

    @holds("Model.make_predict_function", "one_step_on_data")
    def test_what_replicas_run_to_predict_tells_its_model(self):
        found = []

        class Strategy(tf.distribute.MirroredStrategy):
            def run(self, fn, *args, **kwargs):
                found.append(attributes.predicting_model(fn))
                return super().run(fn, *args, **kwargs)

        reduction = tf.distribute.ReductionToOneDevice()
        with Strategy(["CPU:0"], cross_device_ops=reduction).scope():
            model = model_of()
        model.predict_on_batch(X)
        model.test_on_batch(X, [X[:, :1], X[:, :1]])
        self.assertEqual(found, [model, None])
        model.compile("sgd", "mse", jit_compile=True)
        model.predict_on_batch(X)
        self.assertIs(found[-1], model)

    @holds("CompileLoss.build", "_flat_losses")
    def test_losses_are_called_by_their_entries(self):
        model = model_of()
        model._symbolic_build(data_batch=(X, [X[:, :1], X[:, :1]]))
        loss = model._compile_loss
        entries = attributes.flat_losses(loss)
        self.assertEqual([e.loss_weights for e in entries], [1.0, 2.0])
        found = []

        def noting(y_true, y_pred, sample_weight=None):
            found.append((float(y_true[0, 0]), float(y_pred[0, 0])))
            return tf.zeros(())

        others = [e._replace(loss=noting, loss_weights=None) for e in entries]
        members = attributes.with_flat_losses(others)
        other = object.__new__(type("Other", (type(loss),), members))
        other.__dict__.update(loss.__dict__)
        with keras.StatelessScope():
            other([X[:, :1], X[:, :1] * 2], [X[:, :1] * 3, X[:, :1] * 4])
        self.assertEqual(found, [(1.0, 3.0), (2.0, 4.0)])


if __name__ == "__main__":
    tf.test.main()
