"""Bytes of weights and optimizer slots on each device, against the ideal.

    python -m benchmarks.tensor_parallel.memory

Counted are the components that there are, on the devices that they are on.
Ideal is what is sharded over the number of ranks, and all of the rest.
"""

import collections
import math

from absl import app
from absl import flags

_RANKS = flags.DEFINE_integer("ranks", 4, "Model ranks.", lower_bound=2)


def count(name, num_ranks):
    """Bytes by device, of sharded variables and of the others, and of all.

    Returns:
        Two dicts from devices to bytes and two sums of whole variables, each
        first of what is sharded and then of the rest.
    """
    import tensorflow as tf

    import tfscale
    from benchmarks.tensor_parallel import models

    mesh = tfscale.device_mesh(model=num_ranks)
    layouts = models.layout_map(name, mesh)
    with tfscale.MeshStrategy(mesh, layouts).scope():
        model = models.compiled(name)
    x, y = models.batch(name)
    model.fit(x[:num_ranks], y[:num_ranks], verbose=0)
    found, whole = ({}, {}), [0, 0]
    for by_device in found:
        by_device.update(
            (part.device, 0) for part in model.variables[0].value.values
        )
    slots = collections.Counter()
    for variable in (*model.variables, *model.optimizer.variables):
        parts = variable.value.values
        size = tf.as_dtype(variable.dtype).size
        full = math.prod(variable.shape) * size
        sizes = [math.prod(part.shape) * size for part in parts]
        kept_whole = sizes[0] == full
        whole[kept_whole] += full
        for part, length in zip(parts, sizes):
            found[kept_whole][part.device] += length
        slots[kept_whole] += 1
    return found, whole, slots


def main(argv):
    del argv
    import tfscale

    ranks = _RANKS.value
    tfscale.use_virtual_devices(ranks)
    print(
        f"{'':24} {'whole':>11} {'ideal':>11} {'on a device':>15} {'ratio':>7}"
    )
    for name in "mlp", "gpt":
        (sharded, rest), whole, variables = count(name, ranks)
        for title, by_device, full, ideal, number in (
            ("sharded", sharded, whole[0], whole[0] / ranks, variables[0]),
            ("the rest", rest, whole[1], whole[1], variables[1]),
        ):
            low, high = min(by_device.values()), max(by_device.values())
            print(
                f"{name}, {title} ({number})".ljust(24)
                + f" {_mib(full)} {_mib(ideal)} "
                f"{low / 2**20:6.2f} to {high / 2**20:.2f} "
                f"{high / ideal:7.4f}"
            )
        total = max(sharded[device] + rest[device] for device in sharded)
        print(
            f"{name}, all".ljust(24) + f" {_mib(sum(whole))} "
            f"{_mib(whole[0] / ranks + whole[1])} {_mib(total):>15}"
            f" {total / (whole[0] / ranks + whole[1]):7.4f}"
        )


def _mib(number):
    return f"{number / 2**20:7.2f} MiB"


if __name__ == "__main__":
    app.run(main)
