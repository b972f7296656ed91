"""keras_hub, which tfscale itself does not need."""

from absl import app


def models():
    """The module `keras_hub.models`."""
    try:
        from keras_hub import models
    except ImportError as error:
        raise app.UsageError(
            "This example needs keras_hub. Install it with "
            '`pip install "keras-hub>=0.26"`.'
        ) from error
    return models
