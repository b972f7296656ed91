"""Keras' `fit` under TensorFlow's own strategies for several processes.

`python -m tests.mesh.keras_cluster FOLDER`, by keras_strategies_test.py.
Two workers try one of them, and the chief, with servers of its own, the other.
"""

import json
import os
import sys

import keras
import numpy as np
import tensorflow as tf

from tests import forked_processes

X = np.ones((8, 3), "float32")


def parameter_servers():
    """A strategy with a worker and a server in this process."""
    worker, server = forked_processes.free_addresses(2)
    spec = tf.train.ClusterSpec({"worker": [worker], "ps": [server]})
    servers = [tf.distribute.Server(spec, job, 0) for job in ("worker", "ps")]
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        spec, rpc_layer="grpc"
    )
    return tf.distribute.ParameterServerStrategy(resolver), servers


def main():
    config = json.loads(os.environ["TF_CONFIG"])
    task = config["task"]
    if task["type"] == "chief":
        del os.environ["TF_CONFIG"]
        strategy, _ = parameter_servers()
    else:
        del config["cluster"]["chief"]
        os.environ["TF_CONFIG"] = json.dumps(config)
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    try:
        found = model.fit(X, X[:, :1], batch_size=4, shuffle=False).history
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    steps = int(model.optimizer.iterations.numpy())
    path = os.path.join(sys.argv[1], f"{task['type']}{task['index']}.json")
    with open(path, "w") as file:
        json.dump([found, steps], file)
    # Workers of the first kind wait for each other to end.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
