"""The base class of models that wrap a plain Keras model."""

from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale.mesh.models import loading


class WrappedModel(keras.Model):
    """Trains another model, and is saved, copied and pickled as that one.

    Its layers, inputs and outputs are those of `model`.

    Attributes:
        model: The plain Keras model.
    """

    model: keras.Model
    # Called by Keras' loops, created by methods of the subclasses.
    train_function: Any
    test_function: Any
    predict_function: Any
    steps_per_execution: int

    def __init__(self, model: keras.Model):
        super().__init__(name=model.name, dtype=model.dtype_policy)
        self.model = model

    def __getattr__(self, name):
        # Called only for attributes that are not found.
        model = self.__dict__.get("model")
        if model is not None and hasattr(model, name):
            raise AttributeError(
                f"A `{type(self).__name__}` has only the attributes of "
                f"`keras.Model`. Received: {name!r}, an attribute of the model "
                f"inside, {model.name!r} of type {type(model).__name__}. Use "
                f"`wrapped.model.{name}`."
            )
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}."
        )

    def _class(self):
        # An HDF5 file of the old format names this class.
        if attributes.writes_old_format():
            return self.model.__class__
        return type(self)

    __class__: Any = property(_class)

    def __dir__(self):
        # Keras saves all attributes that are listed here. The model inside
        # would be saved twice, since both share layers and optimizer.
        return [name for name in super().__dir__() if name != "model"]

    def _obj_type(self):
        """See `keras.Model`: how attributes to save are found."""
        return attributes.obj_type(self.model)

    @property
    def layers(self) -> list[keras.layers.Layer]:
        """The layers of the model inside."""
        return self.model.layers

    @property
    def inputs(self) -> list[keras.KerasTensor]:
        """The symbolic inputs of the model inside."""
        return self.model.inputs

    @property
    def outputs(self) -> list[keras.KerasTensor]:
        """The symbolic outputs of the model inside."""
        return self.model.outputs

    @property
    def input_shape(self) -> Any:
        """The shape of the inputs, `None` for the batch."""
        return self.model.input_shape

    @property
    def output_shape(self) -> Any:
        """The shape of the outputs, `None` for the batch."""
        return self.model.output_shape

    def call(
        self, inputs: Any, training: bool | None = None, mask: Any = None
    ) -> Any:
        """The model itself, run where it is called."""
        return self.model(inputs, training=training, mask=mask)

    def compile(
        self,
        optimizer: keras.Optimizer | str = "rmsprop",
        loss: Any = None,
        loss_weights: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = None,
        run_eagerly: bool = False,
        steps_per_execution: int = 1,
        jit_compile: bool | str | None = "auto",
        auto_scale_loss: bool = True,
    ) -> None:
        """See `keras.Model.compile`; to be called in the strategy's scope.

        Raises:
            ValueError: If called outside of the scope, or if steps cannot be
                run like that, see the class.
        """
        if tf.distribute.get_strategy() is not self.distribute_strategy:
            raise ValueError(
                "`compile` must be called in the scope of the model's "
                "strategy, because optimizer and metrics create variables. "
                "Received: a call outside. Put it, and the creation of the "
                "optimizer, under `with strategy.scope():`."
            )
        self._compile_in_scope(
            optimizer=optimizer,
            loss=loss,
            loss_weights=loss_weights,
            metrics=metrics,
            weighted_metrics=weighted_metrics,
            run_eagerly=run_eagerly,
            steps_per_execution=steps_per_execution,
            jit_compile=jit_compile,
            auto_scale_loss=auto_scale_loss,
        )

    def _compile_in_scope(self, *, run_eagerly, jit_compile, **arguments):
        """Compiles this model and the one inside; in a subclass."""
        raise NotImplementedError

    def summary(self, *args: Any, **kwargs: Any) -> None:
        """See `keras.Model.summary`; that of the model inside."""
        self.model.summary(*args, **kwargs)

    def save(
        self,
        filepath: Any,
        overwrite: bool = True,
        zipped: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Saves the plain Keras model, see `keras.Model.save`."""
        self.model.save(filepath, overwrite=overwrite, zipped=zipped, **kwargs)

    def save_weights(
        self, filepath: Any, overwrite: bool = True, **kwargs: Any
    ) -> None:
        """Saves the weights of the plain model, see `keras.Model`."""
        self.model.save_weights(filepath, overwrite=overwrite, **kwargs)

    def load_weights(
        self, filepath: Any, skip_mismatch: bool = False, **kwargs: Any
    ) -> None:
        """Loads weights of the plain model, see `keras.Model`.

        All of them or, if the file is damaged or of another model, none: the
        error comes before anything is changed. With `skip_mismatch=True` the
        layers that fit are loaded.
        """
        load_weights = self.model.load_weights
        if skip_mismatch:
            load_weights(filepath, skip_mismatch=True, **kwargs)
        else:
            loading.load_all_or_nothing(load_weights, filepath, **kwargs)

    def export(
        self, filepath: Any, format: str = "tf_saved_model", **kwargs: Any
    ) -> None:
        """Exports the plain Keras model, for one device.

        See `keras.Model.export`. `tfscale.export` keeps the devices.

        Raises:
            ValueError: If weights are sharded, or if the format is "litert"
                and Keras has quantized the model, which TensorFlow's converter
                cannot read.
        """
        quantized = [
            layer
            for layer in attributes.flatten_layers(self.model)
            if getattr(layer, "quantization_mode", None)
        ]
        if format == "litert" and quantized:
            raise ValueError(
                "LiteRT's converter must quantize by itself. Received: "
                f"{self.name!r}, whose layer {quantized[0].path!r} is "
                f"quantized to {quantized[0].quantization_mode}. Export the "
                "float model, with `optimizations=[tf.lite.Optimize.DEFAULT]`."
            )
        self.model.export(filepath, format=format, **kwargs)

    def to_json(self, **kwargs: Any) -> str:
        """The plain Keras model as JSON, see `keras.Model.to_json`."""
        return self.model.to_json(**kwargs)

    def quantize(self, *args: Any, **kwargs: Any) -> None:
        """Quantizes the plain Keras model, see `keras.Model.quantize`."""
        self.model.quantize(*args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        """The configuration of the plain Keras model, with its class.

        In an HDF5 file of Keras' old format it has its own entry.
        """
        if attributes.writes_old_format():
            return self.model.get_config()
        config = keras.saving.serialize_keras_object(self.model)
        # A saved file has it once.
        config.pop("compile_config", None)
        return config

    @classmethod
    def from_config(
        cls,
        config: dict[str, Any],
        custom_objects: dict[str, Any] | None = None,
    ) -> Any:
        """Creates the plain Keras model of the configuration."""
        return keras.saving.deserialize_keras_object(
            config, custom_objects=custom_objects
        )

    def get_build_config(self) -> Any:
        """See `keras.Model`; that of the plain model."""
        return self.model.get_build_config()

    def get_compile_config(self) -> Any:
        """See `keras.Model`; that of the plain model."""
        return self.model.get_compile_config()

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """See `keras.Model`; compiles in the strategy's scope."""
        with self.distribute_strategy.scope():
            arguments = keras.saving.deserialize_keras_object(config)
            self.compile(**arguments)
            self.optimizer.build(self.trainable_variables)
