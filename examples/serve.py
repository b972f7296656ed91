"""Serves what `tfscale.export` wrote, by Ray Serve, as TensorFlow Serving does.

    pip install -e ".[ray]"
    python -m examples.serve --model_path=served/1 --devices_per_replica=2 \
        --max_replicas=4

    curl -d '{"instances": [[1.0, 2.0, 3.0]]}' \
        localhost:8000/v1/models/model:predict

A replica is a process with a mesh of its own. Requests that wait are put into
one batch, several batches are in flight where stages have to be kept busy, and
there are more replicas while there are more requests.
"""

import asyncio
import base64
import json

import numpy as np
from absl import app
from absl import flags

from examples import finite_float

MODEL_PATH = flags.DEFINE_string(
    "model_path", None, "What `tfscale.export` wrote."
)
MODEL_NAME = flags.DEFINE_string(
    "model_name", "model", "The model's name in addresses."
)
PORT = flags.DEFINE_integer("port", 8000, "The port to listen at.")
DEVICES_PER_REPLICA = flags.DEFINE_integer(
    "devices_per_replica",
    1,
    "Devices of a replica: stages times ranks.",
    lower_bound=1,
)
USE_GPUS = flags.DEFINE_bool("gpus", False, "Whether these are GPUs.")
MIN_REPLICAS = flags.DEFINE_integer(
    "min_replicas", 1, "Replicas while there are no requests.", lower_bound=1
)
MAX_REPLICAS = flags.DEFINE_integer(
    "max_replicas", 1, "Replicas while there are many.", lower_bound=1
)
ONGOING_REQUESTS = finite_float.define(
    "ongoing_requests", 32, "Requests that a replica should have at a time."
)
SCALING_DELAY = finite_float.define(
    "scaling_delay", 30, "Seconds of more or fewer requests before it scales."
)
MAX_BATCH_SIZE = flags.DEFINE_integer(
    "max_batch_size", 32, "Requests of a batch.", lower_bound=1
)
BATCH_TIMEOUT = finite_float.define(
    "batch_timeout", 0.002, "Seconds that a request waits for others."
)
BATCHES_IN_FLIGHT = flags.DEFINE_integer(
    "batches_in_flight",
    1,
    "As many as the model has stages. Two keep ranks busy, which wait for each "
    "other.",
    lower_bound=1,
)


class SavedModel:
    """What `tfscale.export` wrote, on the devices of this process."""

    def __init__(self, path, num_devices, use_gpus):
        import tensorflow as tf

        if not use_gpus:
            tf.config.set_logical_device_configuration(
                tf.config.list_physical_devices("CPU")[0],
                [tf.config.LogicalDeviceConfiguration()] * num_devices,
            )
        loaded = tf.saved_model.load(
            path,
            options=tf.saved_model.LoadOptions(
                experimental_variable_policy=(
                    tf.saved_model.experimental.VariablePolicy.SAVE_VARIABLE_DEVICES
                )
            ),
        )
        self._loaded = loaded  # its variables live as long as it does
        signature = loaded.signatures["serving_default"]
        self._inputs = signature.structured_input_signature[1]
        # A signature is a call within a call, which costs a tenth of a batch.
        self._function = tf.function(
            lambda inputs: signature(**inputs), autograph=False
        ).get_concrete_function(self._inputs)

    def inputs_of(self, body):
        """The inputs of a request by name.

        Raises:
            ValueError: If it does not fit the model.
        """
        if not isinstance(body, dict):
            raise ValueError(f"A request is a JSON object. Received: {body!r}.")
        given = body.get("inputs", body.get("instances"))
        if not isinstance(given, list | dict):
            raise ValueError(
                "A request has a list 'instances', or a list or an object "
                f"'inputs'. Received: {given!r}."
            )
        if isinstance(given, dict) and "inputs" not in body:
            raise ValueError(
                f"'instances' is a list of rows. Received: {given!r}."
            )
        if "inputs" not in body and given and isinstance(given[0], dict):
            names = set(given[0])
            rows = [row if isinstance(row, dict) else () for row in given]
            if any(set(row) != names for row in rows):
                raise ValueError("All instances have the same inputs.")
            given = {name: [row[name] for row in given] for name in names}
        if not isinstance(given, dict):
            given = dict.fromkeys(list(self._inputs)[:1], given)
        if set(given) != set(self._inputs):
            raise ValueError(
                f"The model has the inputs {sorted(self._inputs)}. Received: "
                f"{sorted(given)}."
            )
        arrays = {}
        for name, spec in self._inputs.items():
            array = _array_of(name, given[name], spec.dtype)
            if not spec.shape.is_compatible_with(array.shape):
                raise ValueError(
                    f"The input {name!r} has the shape {spec.shape}. Received: "
                    f"{array.shape}."
                )
            arrays[name] = array
        if len({len(array) for array in arrays.values()}) > 1:
            raise ValueError("All inputs of a request have as many rows.")
        return arrays

    def predict(self, requests):
        """The outputs of each of several requests, or the error of its own."""
        try:
            return self._predict(requests)
        except Exception as error:
            if len(requests) == 1:
                return [error]
        # One of them is at fault: the others get their answers.
        return [self.predict([request])[0] for request in requests]

    def _predict(self, requests):
        import tensorflow as tf

        names = requests[0]
        ends = np.cumsum([len(next(iter(x.values()))) for x in requests])
        outputs = self._function(
            {
                name: tf.constant(np.concatenate([x[name] for x in requests]))
                for name in names
            }
        )
        outputs = {name: value.numpy() for name, value in outputs.items()}
        cut = {name: np.split(x, ends[:-1]) for name, x in outputs.items()}
        return [
            {name: parts[number] for name, parts in cut.items()}
            for number in range(len(requests))
        ]


def _array_of(name, values, dtype):
    """An array of the values of a request, which are not made to fit."""
    expected = dtype.as_numpy_dtype
    if expected is object:
        array = np.asarray(values, object)
        fits = all(isinstance(value, (str, bytes)) for value in array.flat)
    else:
        array = np.asarray(values)
        kind = np.dtype(expected)
        fits = not array.size or np.can_cast(array.dtype, kind, "same_kind")
        # NumPy takes no integer of JSON for one without a sign, such as a
        # pixel; below, one that is too large or negative is an error.
        fits |= array.dtype.kind == "i" and kind.kind == "u"
    if not fits:
        raise ValueError(
            f"The input {name!r} takes {dtype.name}. Received: {values!r}."
        )
    return np.asarray(values, expected)


def _decoded(value):
    """A JSON object, or the bytes that it stands for."""
    return base64.b64decode(value["b64"]) if set(value) == {"b64"} else value


def _encoded(value):
    """Bytes as a JSON string, or as what stands for them."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(value).decode()}


def answer_of(body, outputs):
    """The answer of TensorFlow Serving's REST API to a request."""
    encoded = np.vectorize(_encoded, otypes=[object])
    values = {
        name: (encoded(array) if array.dtype == object else array).tolist()
        for name, array in outputs.items()
    }
    if len(values) == 1:
        [values] = values.values()
    if "inputs" in body:
        return {"outputs": values}
    if isinstance(values, dict):
        rows = zip(*values.values())
        values = [dict(zip(values, row)) for row in rows]
    return {"predictions": values}


class Endpoint:
    """A replica: parses requests, and predicts those that wait together."""

    def __init__(self, name, path, num_devices, use_gpus):
        self._name = name
        self._model = SavedModel(path, num_devices, use_gpus)

    async def predict(self, requests):
        """See `SavedModel.predict`; other requests are read meanwhile."""
        return await asyncio.to_thread(self._model.predict, requests)

    async def answer(self, method, path, text):
        """The status of an answer and its JSON, in which there may be NaN."""
        status, content = await self._answer(method, path, text)
        return status, json.dumps(content)

    async def _answer(self, method, path, text):
        if method == "GET" and path == f"/v1/models/{self._name}":
            state = {"version": "1", "state": "AVAILABLE"}
            return 200, {"model_version_status": [state]}
        if method != "POST" or path != f"/v1/models/{self._name}:predict":
            return 404, {"error": f"Nothing is served at {method} {path}."}
        try:
            body = json.loads(text, object_hook=_decoded)
            inputs = self._model.inputs_of(body)
        except Exception as error:
            return 400, {"error": f"{type(error).__name__}: {error}"}
        outputs = await self.predict(inputs)
        if isinstance(outputs, Exception):
            return 400, {"error": f"{type(outputs).__name__}: {outputs}"}
        return 200, answer_of(body, outputs)


def deployment():
    """The endpoint as Ray Serve deploys it, by the flags."""
    from ray import serve
    from ray.serve.config import AutoscalingConfig
    from starlette.responses import Response

    in_flight = BATCHES_IN_FLIGHT.value

    class Served(Endpoint):
        @serve.batch(
            max_batch_size=MAX_BATCH_SIZE.value,
            batch_wait_timeout_s=BATCH_TIMEOUT.value,
            max_concurrent_batches=in_flight,
        )
        async def predict(self, requests):
            return await super().predict(requests)

        async def __call__(self, request):
            status, content = await self.answer(
                request.method, request.url.path, await request.body()
            )
            return Response(content, status, media_type="application/json")

    num_devices = DEVICES_PER_REPLICA.value
    resources = "num_gpus" if USE_GPUS.value else "num_cpus"
    return serve.deployment(
        # With few, Ray's router waits longer and longer for a free replica.
        max_ongoing_requests=max(100, 2 * in_flight * MAX_BATCH_SIZE.value),
        autoscaling_config=AutoscalingConfig(
            min_replicas=MIN_REPLICAS.value,
            max_replicas=MAX_REPLICAS.value,
            target_ongoing_requests=ONGOING_REQUESTS.value,
            upscale_delay_s=SCALING_DELAY.value,
            downscale_delay_s=SCALING_DELAY.value,
        ),
        ray_actor_options={resources: num_devices},
        logging_config={"enable_access_log": False},
    )(Served).bind(
        MODEL_NAME.value, MODEL_PATH.value, num_devices, USE_GPUS.value
    )


def main(_):
    import ray
    from ray import serve

    # Devices of CPUs are threads: there is room for all replicas.
    num_cpus = (
        None
        if USE_GPUS.value
        else MAX_REPLICAS.value * DEVICES_PER_REPLICA.value
    )
    ray.init(num_cpus=num_cpus, include_dashboard=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT.value})
    serve.run(deployment(), route_prefix="/", blocking=True)


if __name__ == "__main__":
    flags.mark_flag_as_required("model_path")
    app.run(main)
