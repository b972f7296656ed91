"""A machine of `machines.py`: a server of TensorFlow, with CPUs as devices.

It ends with its standard input.
"""

import json
import os
import sys

import tensorflow as tf

from tfscale import use_virtual_devices


def main(tasks, task, devices):
    use_virtual_devices(devices)
    server = tf.distribute.Server(
        tf.train.ClusterSpec({"worker": tasks}),
        "worker",
        task,
        protocol="grpc",
        config=tf.compat.v1.ConfigProto(device_count={"CPU": devices}),
    )
    print("null", flush=True)
    sys.stdin.read()
    del server
    os._exit(0)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
