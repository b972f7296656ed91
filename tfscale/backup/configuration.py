"""The configuration of a model, its optimizer and a dataset, to be compared.

Variables of the same shapes may belong to another activation, optimizer or
dtype policy; the same number of batches may be shuffled differently. Left out
is what differs between runs of one program: numbers at the ends of names, code
of lambdas (which contains paths), learning rates, which are restored, and
options that change the speed of steps but not their results.
"""

import json
import re
import warnings

import keras
import tensorflow as tf

from tfscale.backup.export import config_of
from tfscale.graphs.dataset_graph import stages_of

_LEFT_OUT = (
    *("build_config", "build_input_shape", "shared_object_id"),
    *("jit_compile", "run_eagerly", "steps_per_execution"),
)
_NUMBER = re.compile(r"_\d+$")
# Settings of a dataset that change its speed, and not its records.
_SPEED = (
    *("buffer_output_elements", "num_parallel_calls"),
    *("prefetch_input_elements",),
)


def of_model(model: keras.Model) -> str:
    """JSON of the configuration of a model and of its `compile`.

    A class without configuration, or that overrides `compile`, has null.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of lambdas, which are not loaded
        text = config_of(model)
        try:
            compiled = json.loads(json.dumps(model.get_compile_config()))
        except (NotImplementedError, TypeError, ValueError):
            compiled = None
    model_config = json.loads(text) if text is not None else {}
    model_config.pop("compile_config", None)  # a pipeline has it outside
    return json.dumps(_plain({"model": model_config, "compiled": compiled}))


def _plain(value):
    if isinstance(value, dict):
        if value.get("class_name") == "__lambda__":
            return "a lambda"
        return {
            key: _plain(_without_rows(key, v))
            for key, v in value.items()
            if key not in _LEFT_OUT
            and not (key == "learning_rate" and isinstance(v, float))
        }
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return _NUMBER.sub("", value) if isinstance(value, str) else value


def _without_rows(key, value):
    """A batch shape without the rows of a replica's batch."""
    return value[1:] if key == "batch_shape" and value else value


def of_dataset(dataset: tf.data.Dataset) -> list[str]:
    """The stages of a dataset with their integers, such as seeds and sizes.

    Functions, names of files and numbers of threads are left out.
    """
    return [
        f"{stage.kind}{list(_integers(stage))}"
        for stage in stages_of(dataset)
        if not stage.is_a("Prefetch", "Options")
    ]


def _integers(stage):
    for name, value in stage.settings.items():
        if type(value) is int and name not in _SPEED:
            yield value


def difference(now: str, saved: str | None) -> str | None:
    """The first path at which two configurations differ, or None."""
    if now == saved:
        return None
    return _difference(json.loads(now), json.loads(saved or "null"), "")


def _difference(now, saved, path):
    if type(now) is type(saved) and isinstance(now, dict | list):
        if isinstance(now, list):
            same_length = len(now) == len(saved)
            now, saved = dict(enumerate(now)), dict(enumerate(saved))
            keys = list(now) if same_length else []
        else:
            keys = sorted({*now, *saved})
        for key in keys:
            found = _difference(
                now.get(key), saved.get(key), f"{path}/{key}".strip("/")
            )
            if found is not None:
                return found
        if keys or now == saved:
            return None
        return f"{path} of {len(now)}, saved {len(saved)}"
    if now == saved:
        return None
    return f"{path} {_short(now)}, saved {_short(saved)}"


def _short(value):
    text = json.dumps(value)
    return text if len(text) < 100 else f"{text[:100]}..."
