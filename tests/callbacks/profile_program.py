"""Profiles two steps in each of several workers with two replicas.

    python -m tfscale.launch ... -m tests.callbacks.profile_program FOLDER

Each writes its devices with their shares of computing, its layers and its logs.
"""

import json
import sys

import keras
import numpy as np

import tfscale


def main():
    folder = sys.argv[1]
    tfscale.initialize()
    strategy = tfscale.MeshStrategy(tfscale.device_mesh(data=4))
    with strategy.scope():
        layers = [keras.layers.Dense(16, name=f"layer_{i}") for i in range(4)]
        model = keras.Sequential([keras.Input((16,)), *layers])
        model.compile("sgd", "mse")
    x = np.ones((64, 16), "float32")
    profile = tfscale.callbacks.Profile((4, 6), folder)
    history = model.fit(
        x, x, batch_size=8, shuffle=False, verbose=2, callbacks=[profile]
    )
    devices = {name: one.compute for name, one in profile.shares.items()}
    index = strategy.extended.workers.index
    with open(f"{folder}/{index}.json", "w") as file:
        json.dump([devices, sorted(profile.layers), history.history], file)


if __name__ == "__main__":
    main()
