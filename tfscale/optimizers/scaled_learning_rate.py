"""The learning rate of a batch that is larger by the number of replicas."""

from typing import Any

import keras
import tensorflow as tf

from tfscale.integers import check_integer

_RULES = {"linear": 1.0, "sqrt": 0.5}


@keras.saving.register_keras_serializable(package="tfscale")
class ScaledLearningRate(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate that is right for one replica, on several.

    A batch of `num_replicas` times the size makes as many times fewer updates,
    with less noise. By the linear scaling rule each is as many times longer;
    by the square root, which suits Adam and its like, the noise of an update
    stays the same. Large steps are wrong at the beginning, where weights
    change fast: over `warmup_steps` the rate goes from that of one replica to
    the scaled one, in a straight line.

    Sources: Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in
    1 Hour (2017), sections 2.1 and 2.2, who warm up for 5 epochs; Krizhevsky,
    One weird trick for parallelizing convolutional neural networks (2014), for
    the square root.

    Args:
        learning_rate: What is right for one replica: a float, or a
            `LearningRateSchedule` of steps of all replicas, whose values are
            scaled.
        num_replicas: How many times larger the batch is, as
            `strategy.num_replicas_in_sync`.
        warmup_steps: How many steps the warm-up takes; 0 for none.
        rule: `"linear"` or `"sqrt"`.

    Raises:
        ValueError: If `num_replicas` is below 1, `warmup_steps` is negative or
            the rule is unknown.

    Example:

    >>> schedule = ScaledLearningRate(0.1, num_replicas=8, warmup_steps=10)
    >>> [round(float(schedule(step)), 6) for step in (0, 5, 10, 1000)]
    [0.1, 0.45, 0.8, 0.8]
    """

    def __init__(
        self,
        learning_rate: Any,
        num_replicas: int,
        warmup_steps: int = 0,
        rule: str = "linear",
    ):
        check_integer("num_replicas", num_replicas)
        check_integer("warmup_steps", warmup_steps, 0)
        if rule not in tuple(_RULES):
            raise ValueError(
                f"`rule` must be one of {', '.join(_RULES)}. Received: "
                f"rule={rule!r}."
            )
        self.learning_rate = learning_rate
        self.num_replicas = num_replicas
        self.warmup_steps = warmup_steps
        self.rule = rule

    def __call__(self, step):
        """The rate of a step, counted from 0; a float32 scalar."""
        rate = self.learning_rate
        if callable(rate):
            rate = rate(step)
        factor = self.num_replicas ** _RULES[self.rule]
        if self.warmup_steps:
            done = tf.cast(step, tf.float32) / self.warmup_steps
            factor = 1.0 + (factor - 1.0) * tf.minimum(done, 1.0)
        return tf.cast(rate, tf.float32) * factor

    def get_config(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        rate = self.learning_rate
        if callable(rate):
            rate = keras.saving.serialize_keras_object(rate)
        return {
            "learning_rate": rate,
            "num_replicas": self.num_replicas,
            "warmup_steps": self.warmup_steps,
            "rule": self.rule,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Made again of what `get_config` returned."""
        rate = config["learning_rate"]
        if isinstance(rate, dict):
            rate = keras.saving.deserialize_keras_object(rate)
        return cls(**{**config, "learning_rate": rate})
