"""Images per second of every contestant, compared within rounds.

Every round runs each contestant for one epoch, in a rotated order. Contestants
are compared by the ratios of their rates within the same round, because the
machine's speed changes from round to round, and by the median over rounds. The
processor's time for a picture tells what a contestant costs, whoever else uses
the machine meanwhile.

The fastest of many noisy contestants is fast by luck as well. Therefore the
best of the grid and AUTOTUNE is chosen by the even rounds and compared in the
odd ones, and the other way round.

python -m benchmarks.input_pipeline
"""

import os
import platform
import re
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
    "num_rounds", 8, "Epochs of each contestant.", lower_bound=2
)
ONLY = flags.DEFINE_string(
    "only", "", "Regular expression: contestants whose names hold it take part."
)
DIRECTORY = flags.DEFINE_string(
    "directory", None, "Where the pictures are made; by default temporary."
)


def _chosen(datasets):
    return {n: d for n, d in datasets.items() if re.search(ONLY.value, n)}


def _seconds(dataset):
    """Seconds of an epoch: on the clock, and of the processor."""
    begin, busy = time.perf_counter(), time.process_time()
    for _ in dataset:
        pass
    return time.perf_counter() - begin, time.process_time() - busy


def _interleaved(datasets, num_rounds):
    """Pictures per second, and per processor's second, of each dataset."""
    rates = {name: [] for name in datasets}
    costs = {name: [] for name in datasets}
    for number in range(num_rounds + 1):
        # Who comes first changes, so that none always follows the same.
        names = list(datasets)
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            seconds, busy = _seconds(datasets[name])
            if number:  # the first round warms up
                rates[name].append(NUM_IMAGES.value / seconds)
                costs[name].append(NUM_IMAGES.value / busy)
    return rates, costs


def _print(rates, costs):
    print("images/s  lowest  highest  processor's us per image")
    median = {name: statistics.median(all_) for name, all_ in rates.items()}
    for name in sorted(median, key=median.get, reverse=True):
        low, high = min(rates[name]), max(rates[name])
        cost = 1e6 / statistics.median(costs[name])
        print(
            f"{median[name]:8.0f}  {low:6.0f}  {high:7.0f}  {cost:8.0f}  {name}"
        )


def _ratio(ours, theirs):
    """Ratios of the rates within each round: median, and quartiles."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    if len(ratios) < 2:
        return ratios[0], ratios[0], ratios[0]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return middle, low, high


def _best_of(rates, names):
    """Each round's rate of whoever is the fastest in the other half."""
    others = {half: _fastest(rates, names, 1 - half) for half in (0, 1)}
    rounds = range(len(rates[names[0]]))
    print(f"Chosen by the odd rounds: {others[0]}; even: {others[1]}")
    return [rates[others[number % 2]][number] for number in rounds]


def _fastest(rates, names, half):
    """By the median of the rates over the round's mean of all of them."""

    def score(name):
        return statistics.median(
            rates[name][number]
            / statistics.mean(rates[other][number] for other in names)
            for number in range(half, len(rates[name]), 2)
        )

    return max(names, key=score)


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
        grid = _chosen(contestants.grid(folder))
        others = _chosen(contestants.others(folder, pattern))
        rates, costs = _interleaved({**grid, **others}, NUM_ROUNDS.value)
    _print(rates, costs)
    theirs = {n: rates[n] for n in others if not n.startswith("tfscale")}
    tuned = [n for n in rates if n in grid or n == "AUTOTUNE, files"]
    if tuned:
        theirs["the best of the grid and AUTOTUNE"] = _best_of(rates, tuned)
    ours = [name for name in others if name.startswith("tfscale")]
    print("Ratios within a round: median, lower and upper quartile")
    _compare(rates, ours, theirs)
    print("The same per second of the processor")
    _compare(costs, ours, {n: costs[n] for n in theirs if n in costs})


def _compare(rates, ours, theirs):
    for one in ours:
        for name, those in theirs.items():
            middle, low, high = _ratio(rates[one], those)
            print(f"{middle:6.3f} {low:6.3f} {high:6.3f}  {one} / {name}")


if __name__ == "__main__":
    app.run(main)
