"""A process that predicts when it is told to."""

import json
import logging
import sys
import time

import numpy as np

from benchmarks.serving import models


def bytes_of(model):
    """Of the variables, on the device that has most."""
    plain = getattr(model, "model", model)
    sizes = {}
    for variable in plain.variables:
        for part in getattr(variable.value, "values", [variable.value]):
            size = int(np.prod(part.shape)) * part.dtype.size
            sizes[part.device] = sizes.get(part.device, 0) + size
    return max(sizes.values())


def main(config):
    """Answers each line by the seconds of a `predict`."""
    logging.disable()
    axes = config["axes"]
    models.one_core_each(int(np.prod([*axes.values()])))
    model, rows = models.make(config["kind"], axes, config["microbatches"])
    for _ in range(2):
        model.predict(rows, batch_size=config["batch"], verbose=0)
    for _ in sys.stdin:
        begin, used = time.perf_counter(), time.process_time()
        model.predict(rows, batch_size=config["batch"], verbose=0)
        answer = {
            "seconds": time.perf_counter() - begin,
            "processor": time.process_time() - used,
            "bytes": bytes_of(model),
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
