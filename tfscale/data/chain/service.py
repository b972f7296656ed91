"""The chain on the workers of a tf.data service, in the same order.

A service returns batches in the order in which its workers finish them.
Therefore the steps of an epoch are divided into lanes. Each lane is one split
of the service, which one worker processes in order. The lanes are interleaved
here, one batch from each in turn:

    lane 0   step 0       step 4       step 8   ...    some worker
    lane 1      step 1       step 5       ...          some worker
    lane 2         step 2       step 6    ...          ...
    lane 3            step 3       step 7 ...

Each iterator registers the datasets of an epoch again, with its position.
"""

import dataclasses
import socket
import time
import warnings

import tensorflow as tf

from tfscale.data.order import stream


def reach(address, *, patience=30.0):
    """Waits up to `patience` seconds until a dispatcher answers.

    tf.data itself would wait for ever without a message.
    """
    protocol, found, target = address.partition("://")
    host, _, port = target.rpartition(":")
    if not (found and protocol and host and port.isdecimal()):
        raise ValueError(
            "`service` must be the address of a dispatcher, such as "
            f'"grpc://host:5000". Received: service={address!r}.'
        )
    end = time.monotonic() + patience
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), 5.0).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise ConnectionError(
                    "A tf.data service must run before its pipeline is created."
                    f" Received: service={address!r}, which has not answered "
                    f"for {patience:.0f} s: {error}. Start its dispatcher, or "
                    "correct the address."
                ) from error
        time.sleep(0.2)


LANES = 8


def batches(recipe, position, make):
    """Keyed batches of an epoch; `make(recipe, position)` builds a lane's."""
    lanes = recipe.num_lanes

    def epoch(start):
        def lane(number):
            of_lane = dataclasses.replace(recipe, lane=number)
            return _on_service(make(of_lane, start), recipe.service)

        return tf.data.Dataset.range(lanes).interleave(
            lane,
            cycle_length=lanes,
            block_length=1,
            num_parallel_calls=lanes,
            deterministic=True,
        )

    head = tf.data.Dataset.from_tensors(0).map(
        lambda _: stream.epoch_start(recipe, position)
    )
    return head.flat_map(epoch)


def _on_service(dataset, service):
    distribute = tf.data.experimental.service.distribute(
        processing_mode=tf.data.experimental.service.ShardingPolicy.DYNAMIC,
        service=service,
    )
    with warnings.catch_warnings():
        # The options are set later.
        warnings.filterwarnings("ignore", "To make it possible to preserve")
        return dataset.apply(distribute)
