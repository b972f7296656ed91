"""A program that trains in less address space than a whole batch needs."""

import resource

import keras
import numpy as np

from tfscale.callbacks import GradientAccumulation

ROWS, WIDTH, LAYERS = 128, 1 << 16, 18  # 32 MiB for each layer
ALLOWED = 600 << 20


def main():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(WIDTH)])
    for _ in range(LAYERS):
        model.add(keras.layers.Activation("relu"))
    model.add(keras.layers.Dense(1))
    model.compile("sgd", "mse")
    x = np.ones((ROWS, 1), "float32")
    # Threads, and what libraries keep.
    model.fit(x[:2], x[:2], callbacks=[GradientAccumulation(2)], verbose=0)
    taken = resource.RLIM_INFINITY
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmSize:"):
                taken = int(line.split()[1]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (taken + ALLOWED, taken + ALLOWED))
    accumulation = GradientAccumulation("auto")
    many = np.ones((9 * ROWS, 1), "float32")
    model.fit(many, many, batch_size=ROWS, verbose=0, callbacks=[accumulation])
    print("found", accumulation.found_num_microbatches, flush=True)
    model.fit(x, x, batch_size=ROWS, verbose=0)
    print("the whole batch fits", flush=True)


if __name__ == "__main__":
    main()
