"""LARS: momentum whose steps are in proportion to the weights they change."""

from typing import Any

import keras
import tensorflow as tf


@keras.saving.register_keras_serializable(package="tfscale")
class LARS(keras.optimizers.Optimizer):
    """Layer-wise adaptive rate scaling, for batches of thousands.

    With weights w, their gradient g, velocity v, learning rate `lr`, each
    variable by itself::

        ratio = trust_coefficient * |w| / (|g| + weight_decay * |w|)
        v     = momentum * v + lr * ratio * (g + weight_decay * w)
        w     = w - v

    Variables with fewer than two dims, biases and scales of normalizations,
    have a ratio of 1 and no weight decay, as is the custom; so has a variable
    whose weights or gradient are all zero, but for the decay.

    Source: You, Gitman and Ginsburg, Large Batch Training of Convolutional
    Networks (2017), algorithm 1.

    Under `tfscale.MeshStrategy` norms are those of whole variables and of the
    whole batch's gradient, also of variables that are sharded and with
    `zero_stage=1`; these two not within a `LossScaleOptimizer`.

    Args:
        learning_rate: A float, a `LearningRateSchedule` or a callable. LARS
            wants larger ones than SGD.
        momentum: See above.
        weight_decay: See above. Not decoupled, unlike that of other Keras
            optimizers.
        trust_coefficient: See above.
        **kwargs: Arguments of every Keras optimizer: `name`, `clipnorm`,
            `clipvalue`, `global_clipnorm`, `use_ema`, `ema_momentum`,
            `ema_overwrite_frequency`, `loss_scale_factor`,
            `gradient_accumulation_steps`.

    Raises:
        ValueError: If `momentum` is not from 0 to 1, `weight_decay` is
            negative, or `trust_coefficient` is not above 0.

    Example:

    >>> import keras
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> model.compile(LARS(learning_rate=1.0, weight_decay=1e-4), "mse")
    >>> model.optimizer.get_config()["trust_coefficient"]
    0.001
    """

    def __init__(
        self,
        learning_rate: Any = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        name: str | None = "lars",
        **kwargs: Any,
    ):
        for argument, value, holds, rule in (
            ("momentum", momentum, 0 <= momentum <= 1, "from 0 to 1"),
            ("weight_decay", weight_decay, weight_decay >= 0, "0 or above"),
            (
                "trust_coefficient",
                trust_coefficient,
                trust_coefficient > 0,
                "above 0",
            ),
        ):
            if not holds:
                raise ValueError(
                    f"`{argument}` must be {rule}. Received: "
                    f"{argument}={value}."
                )
        # Keras' own weight decay is none: it would act before the norms.
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        self.momentum = momentum
        self.trust_coefficient = trust_coefficient
        self.decay = weight_decay

    def build(self, variables: Any) -> None:
        """Makes a velocity for each variable."""
        if self.built:
            return
        super().build(variables)
        (self._velocities,) = self.add_optimizer_variables(
            variables, ["velocity"]
        )

    def update_step(
        self, gradient: Any, variable: Any, learning_rate: Any
    ) -> None:
        """See the class."""
        # Rows of lookups are added up: their norm would be another one.
        gradient = tf.cast(tf.convert_to_tensor(gradient), variable.dtype)
        weights = tf.convert_to_tensor(variable)
        rate = tf.cast(learning_rate, variable.dtype)
        if has_ratio(variable):
            norms = self.norms(weights, gradient, variable)
            rate *= tf.cast(self._ratio(*norms), variable.dtype)
            gradient += self.decay * weights
        velocity = self._velocities[self._get_variable_index(variable)]
        self.assign(
            velocity,
            self.momentum * tf.convert_to_tensor(velocity) + rate * gradient,
        )
        self.assign_sub(variable, tf.convert_to_tensor(velocity))

    def get_config(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        return {
            **super().get_config(),
            "momentum": self.momentum,
            "weight_decay": self.decay,
            "trust_coefficient": self.trust_coefficient,
        }

    def norms(self, weights: Any, gradient: Any, variable: Any) -> Any:
        """Norms of the weights and of the gradient of a variable.

        Args:
            weights: The value of the variable.
            gradient: Its gradient, dense.
            variable: The variable.
        """
        del variable
        # Of few digits, squares of gradients are soon zero.
        dtype = keras.backend.result_type(weights.dtype, "float32")
        return (
            tf.norm(tf.cast(weights, dtype)),
            tf.norm(tf.cast(gradient, dtype)),
        )

    def _ratio(self, of_weights, of_gradient):
        ratio = self.trust_coefficient * tf.math.divide_no_nan(
            of_weights, of_gradient + self.decay * of_weights
        )
        is_known = tf.logical_and(of_weights > 0, of_gradient > 0)
        return tf.where(is_known, ratio, 1.0)


def has_ratio(variable) -> bool:
    """Whether steps of a variable are in proportion to its norm."""
    return len(variable.shape) >= 2
