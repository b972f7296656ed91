"""A model on a mesh as a SavedModel that keeps its devices."""

import os
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale.mesh.models.wrapped_model import WrappedModel
from tfscale.mesh.strategy import MeshStrategy

_PATTERNS = frozenset("[\\")


def export(model: keras.Model, path: str | os.PathLike) -> None:
    """Writes a SavedModel whose stages and ranks run on devices of their own.

    `keras.Model.export` forgets the devices of a model. This keeps them: the
    graph names the devices of the mesh, and each variable, or shard of one, is
    saved as it lies and read where it is used. No value is gathered. TensorFlow
    Serving or `tf.saved_model.load` serve it, without tfscale and without
    Keras. It needs devices of the same names, or `allow_soft_placement`; with
    `tf.saved_model.load` variables lie on their devices only with
    `tf.saved_model.LoadOptions(experimental_variable_policy=
    tf.saved_model.experimental.VariablePolicy.SAVE_VARIABLE_DEVICES)`.

    The signature `"serving_default"` is `predict_step`: it takes the model's
    inputs by name, with any number of rows, and returns what `predict` does:
    outputs by key, or `output_0`, `output_1`, ...

    Args:
        model: A functional or Sequential model, or a
            `tfscale.PipelineModel`, made in the scope of a `MeshStrategy` with
            one replica.
        path: The folder to write. It must have no `[` and no backslash.

    Raises:
        TypeError: If `model` is no Keras model.
        ValueError: If the model is not on a mesh, on several replicas or on
            devices of other processes, or says no shape of its inputs, or
            TensorFlow could not read the folder.

    Example:

    >>> import tempfile
    >>> import keras
    >>> import tensorflow as tf
    >>> import tfscale
    >>> tfscale.use_virtual_devices(8)
    >>> strategy = tfscale.MeshStrategy(tfscale.device_mesh(pipeline=2))
    >>> with strategy.scope():
    ...     model = keras.Sequential(
    ...         [keras.Input((8,)), *(keras.layers.Dense(8) for _ in range(4))]
    ...     )
    ...     model = tfscale.PipelineModel(model, num_microbatches=2)
    ...     model.compile()
    >>> folder = tempfile.mkdtemp()
    >>> tfscale.export(model, folder)
    >>> serve = tf.saved_model.load(folder).signatures["serving_default"]
    >>> [outputs] = serve(tf.ones((3, 8))).values()
    >>> outputs.shape
    TensorShape([3, 8])
    """
    strategy = _check(model)
    path = os.fspath(path)
    if not _PATTERNS.isdisjoint(path):
        raise ValueError(
            "`path` must have no '[' and no backslash, because TensorFlow "
            "reads the path of a SavedModel's variables as a pattern. "
            f"Received: path={path!r}. Export to another folder."
        )
    model.make_predict_function()  # a pipeline reads what its layers are now

    def serve(inputs):
        outputs = strategy.run(model.predict_step, args=((inputs,),))
        outputs = tf.nest.map_structure(
            lambda output: strategy.experimental_local_results(output)[0],
            outputs,
        )
        # A signature has no dicts of lists.
        if isinstance(outputs, dict) and all(
            map(tf.is_tensor, outputs.values())
        ):
            return outputs
        flat = enumerate(keras.tree.flatten(outputs))
        return {f"output_{number}": output for number, output in flat}

    with strategy.scope():
        function = tf.function(serve, autograph=False)
        concrete = function.get_concrete_function(_specs(model))
    # Copies and shards of variables, each on its own device, and tables of
    # layers that look strings up, as in `keras.Model.export`.
    kind = tf.saved_model.experimental.TrackableResource
    descendants = tf.train.TrackableView(model).descendants()
    tracked = tf.train.Checkpoint(
        values=list(concrete.graph.variables),
        tables=[each for each in descendants if isinstance(each, kind)],
    )
    tf.saved_model.save(
        tracked,
        path,
        signatures=concrete,
        options=tf.saved_model.SaveOptions(
            experimental_variable_policy=(
                tf.saved_model.experimental.VariablePolicy.SAVE_VARIABLE_DEVICES
            ),
            # A server needs none, and loops of a stage are in a process twice.
            experimental_custom_gradients=False,
        ),
    )


def _specs(model) -> Any:
    """The signature of `predict_step`, with the names of the inputs."""
    if isinstance(model, WrappedModel):
        model = model.model
    return keras.tree.map_structure(
        lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype, tensor.name),
        attributes.inputs_structure(model),
    )


def _check(model):
    if not isinstance(model, keras.Model):
        raise TypeError(
            "`tfscale.export` takes a Keras model. Received: "
            f"{type(model).__name__}."
        )
    strategy = model.distribute_strategy
    if not isinstance(strategy, MeshStrategy):
        raise ValueError(
            "`tfscale.export` needs a model created in the scope of a "
            f"`tfscale.MeshStrategy`. Received: {model.name!r}, made under "
            f"{type(strategy).__name__}. Use `model.export(path)`: there are "
            "no devices to keep."
        )
    replicas = strategy.num_replicas_in_sync
    if replicas > 1:
        raise ValueError(
            "A served model must have one replica, because each is a server "
            f"process. Received: {model.name!r} on a mesh with "
            f"data={replicas}. Save its weights, load them into the model on a "
            f"mesh with data=1, export it and start {replicas} servers."
        )
    remote = [
        name
        for row in strategy.device_rows
        for name in row
        if "/job:localhost/" not in name
    ]
    if remote:
        raise ValueError(
            f"A SavedModel is served by one process. Received: {model.name!r} "
            f"on devices of other processes, {remote[0]!r}. Load its weights "
            "into the model on a mesh of one machine, and export it."
        )
    # A Sequential model that is not built raises an error of its own.
    if not (model.built and getattr(model, "inputs", None)):
        raise ValueError(
            "A model must define the shapes of its inputs to be exported. "
            f"Received: {model.name!r} of type {type(model).__name__} without "
            "inputs. Make it a functional or Sequential model that begins "
            "with `keras.Input`."
        )
    return strategy
