"""Every algorithm on 2 to 8 devices, 1 KiB to 64 MiB, beside its prediction.

    python -m benchmarks.collectives.speed

For each number of devices there is a process, in which a device is one core:
one intra-op thread, one inter-op thread for each device. In it the algorithms
take turns, so that a machine that slows down slows all of them down.
"""

import statistics

from absl import app
from absl import flags

from benchmarks import processes

_DEVICES = flags.DEFINE_list("devices", ["2", "3", "4", "6", "8"], "How many.")
_SIZES = flags.DEFINE_list(
    "kib", ["1", "16", "256", "4096", "65536"], "KiB of the whole tensor."
)
_ROUNDS = flags.DEFINE_integer("rounds", 7, "How often each takes its turn.")


def main(argv):
    del argv
    for num_devices in map(int, _DEVICES.value):
        config = {
            "devices": num_devices,
            "sizes": [int(kib) << 10 for kib in _SIZES.value],
            "rounds": _ROUNDS.value,
        }
        found = processes.measure("benchmarks.collectives.worker", config)
        _print_table(num_devices, found)


def _print_table(num_devices, rows):
    print(f"\n{num_devices} devices (ms measured / ms predicted)\n")
    names = list(rows[0]["measured"])
    columns = [*names, "chosen", "chosen over direct"]
    print("| KiB | " + " | ".join(columns) + " |")
    print("|---" * (1 + len(columns)) + "|")
    for row in rows:
        cells = [
            f"{1e3 * statistics.median(row['measured'][name]):.2f} / "
            f"{1e3 * row['predicted'][name]:.2f}"
            for name in names
        ]
        # Of each round by itself: both took their turn at the same time.
        ratios = [
            direct / chosen
            for direct, chosen in zip(
                row["measured"]["direct"],
                row["measured"][row["chosen"]],
                strict=True,
            )
        ]
        cells += [row["chosen"], f"{statistics.median(ratios):.2f}"]
        print(f"| {row['bytes'] >> 10} | " + " | ".join(cells) + " |")
    print("\nms of a step that exchanges nothing, which is in all of them:")
    for row in rows:
        without = 1e3 * statistics.median(row["without"])
        print(f"  {row['bytes'] >> 10} KiB: {without:.2f}")


if __name__ == "__main__":
    app.run(main)
