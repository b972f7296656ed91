"""Images per second of every contestant, interleaved, medians.

python -m benchmarks.input_pipeline
"""

import os
import platform
import statistics
import tempfile
import time

import keras
import tensorflow as tf
from absl import app
from absl import flags

from benchmarks.input_pipeline import contestants
from benchmarks.input_pipeline import jpegs

NUM_IMAGES = flags.DEFINE_integer(
    "num_images", 1536, "Pictures in an epoch.", lower_bound=64
)
NUM_ROUNDS = flags.DEFINE_integer(
    "num_rounds", 15, "Epochs of each contestant.", lower_bound=1
)
DIRECTORY = flags.DEFINE_string(
    "directory", None, "Where the pictures are made; by default temporary."
)
NUM_GRID_ROUNDS = flags.DEFINE_integer(
    "num_grid_rounds",
    2,
    "Epochs of each point of the grid, of which the fastest takes part.",
    lower_bound=1,
)


def _seconds(dataset):
    begin = time.perf_counter()
    for _ in dataset:
        pass
    return time.perf_counter() - begin


def _interleaved(datasets, num_rounds):
    """Rates of each dataset, one epoch of each in every round."""
    rates = {name: [] for name in datasets}
    for number in range(num_rounds + 1):
        # Who comes first changes, so that none always follows the same.
        names = list(datasets)
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            rate = NUM_IMAGES.value / _seconds(datasets[name])
            if number:  # the first round warms up
                rates[name].append(rate)
    return rates


def _print(rates):
    print("images/s  lowest  highest")
    median = {name: statistics.median(all_) for name, all_ in rates.items()}
    for name in sorted(median, key=median.get, reverse=True):
        low, high = min(rates[name]), max(rates[name])
        print(f"{median[name]:8.0f}  {low:6.0f}  {high:7.0f}  {name}")


def main(_):
    with tempfile.TemporaryDirectory() as temporary:
        folder, pattern = jpegs.make(
            DIRECTORY.value or temporary, NUM_IMAGES.value
        )
        print(
            f"{os.cpu_count()} cores, {platform.machine()}, Python "
            f"{platform.python_version()}, TensorFlow {tf.__version__}, Keras "
            f"{keras.__version__}; {NUM_IMAGES.value} images, "
            f"{NUM_ROUNDS.value} rounds"
        )
        grid = _interleaved(contestants.grid(folder), NUM_GRID_ROUNDS.value)
        _print(grid)
        best = max(grid, key=lambda name: max(grid[name]))
        rates = _interleaved(
            {
                f"best of the {best}": contestants.grid(folder)[best],
                **contestants.others(folder, pattern),
            },
            NUM_ROUNDS.value,
        )
    _print(rates)
    print("Medians of the ratios within a round:")
    for kind in ("files", "TFRecord"):
        ours = rates[f"tfscale, {kind}"]
        for name, theirs in rates.items():
            if not name.startswith("tfscale"):
                ratio = statistics.median(a / b for a, b in zip(ours, theirs))
                print(f"{ratio:6.3f}  tfscale, {kind} / {name}")


if __name__ == "__main__":
    app.run(main)
