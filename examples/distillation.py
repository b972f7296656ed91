"""A student and its teachers as one functional model with two outputs.

    L = (1 - alpha) L_hard
        + alpha T^2 KL(softmax(teacher / T) || softmax(student / T))

Plain `compile` and `fit` train it, on any mesh: sample weights, regularizers
and masks count (Hinton, Vinyals, Dean 2015, section 2).
"""

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="examples")
class SoftTargets(keras.losses.Loss):
    """T^2 KL of a student's logits from a teacher's.

    `y_pred` is both, stacked along dim 1, or the student's, with those of the
    teacher as `y_true`.
    """

    def __init__(self, temperature=3.0, name="soft_targets", **kwargs):
        super().__init__(name=name, **kwargs)
        self.temperature = temperature

    def call(self, y_true, y_pred):
        """See `keras.losses.Loss`; a value for each row."""
        if len(y_pred.shape) == len(y_true.shape):
            student, teacher = y_pred, ops.cast(y_true, y_pred.dtype)
        else:
            student, teacher = y_pred[:, 0], y_pred[:, 1]
        student = ops.log_softmax(student / self.temperature)
        teacher = ops.log_softmax(teacher / self.temperature)
        divergence = ops.sum(ops.exp(teacher) * (teacher - student), -1)
        return self.temperature**2 * divergence

    def get_config(self):
        """See `keras.losses.Loss`."""
        return {**super().get_config(), "temperature": self.temperature}


def with_teachers(student, teachers):
    """The student and the mean logits of its teachers, which are frozen."""
    inputs = keras.Input(student.input_shape[1:])
    for teacher in teachers:
        teacher.trainable = False
    soft = [teacher(inputs) for teacher in teachers]
    soft = keras.layers.Average()(soft) if len(soft) > 1 else soft[0]
    logits = student(inputs)
    both = ops.stack([logits, ops.stop_gradient(soft)], 1)
    return keras.Model(inputs, {"hard": logits, "soft": both})


def with_logits(student):
    """The student alone: its soft targets are logits predicted before."""
    inputs = keras.Input(student.input_shape[1:])
    logits = student(inputs)
    soft = keras.layers.Identity(name="soft")(logits)
    return keras.Model(inputs, {"hard": logits, "soft": soft})


def losses(alpha=0.5, temperature=3.0):
    """Arguments of `compile`."""
    return {
        "loss": {
            "hard": keras.losses.SparseCategoricalCrossentropy(
                from_logits=True
            ),
            "soft": SoftTargets(temperature),
        },
        "loss_weights": {"hard": 1 - alpha, "soft": alpha},
    }
