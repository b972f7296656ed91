"""What BatchNormalization layers see in microbatches, put together."""

import tensorflow as tf

from tfscale.whole_batch import batch_norm


class MicrobatchStep(batch_norm.Step):
    """What the layers of a replica note down in one microbatch.

    Attributes:
        calls: For each call of a layer what it is, and had before the first.
        moments: Count, mean and variance of each call.
    """

    def __init__(self):
        super().__init__()
        self.calls = []
        self.moments = []
        self._layers = {}

    def note(self, layer, moments) -> None:
        """See `Step.note`."""
        if id(layer) not in self._layers:
            noted = batch_norm.Noted.of(layer, moments[1])
            self._layers[id(layer)] = noted
        self.calls.append(self._layers[id(layer)])
        count, mean, variance = map(tf.stop_gradient, moments)
        self.moments.append((count, mean, variance))


def combined(first, second):
    """Count, mean and variance of two parts.

    Source: Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm
    for Computing Sample Variances (1979), equations 2.1.
    """
    (n, mean, variance), (m, other, other_variance) = first, second
    share = tf.math.divide_no_nan(m, n + m)
    apart = other - mean
    return (
        n + m,
        mean + share * apart,
        variance
        + share * (other_variance - variance)
        + share * (1.0 - share) * tf.square(apart),
    )
