"""What workers do beside training by `fit` with arrays, and what is refused."""

import contextlib
import functools
import os
import tempfile
import time
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests import same_numbers
from tests.mesh import workers_rows
from tfscale._internals import releases
from tfscale.mesh import timing

X, Y = workers_rows.X, workers_rows.Y


def _strategy(**axes):
    return tfscale.MeshStrategy(tfscale.device_mesh(data=2, **axes))


def _model(strategy=None, optimizer=lambda: keras.optimizers.SGD(0.1)):
    """A model in which every step counts, with the same weights each time.

    Alone it runs by operations: some steps are not worth a trace.
    """
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = workers_rows.dense()
        model.compile(optimizer(), "mse", run_eagerly=not strategy)
    return model


def _weights(model):
    return [np.array(v) for v in model.variables]


def own_batches(index):
    """Batches of worker `index`: three of the first, one of the second."""
    places = [[0, 4], [8, 12], [12, 15]] if index == 0 else [[4, 8]]
    return [(X[a:b], Y[a:b]) for a, b in places]


def dataset_of(batches):
    """A dataset of batches of any size."""
    spec = tuple(
        tf.TensorSpec([None, *part.shape[1:]], part.dtype)
        for part in batches[0]
    )
    dataset = tf.data.Dataset.from_generator(
        lambda: iter(batches), output_signature=spec
    )
    return dataset.apply(tf.data.experimental.assert_cardinality(len(batches)))


def own_data(index):
    """One worker has more batches than the other, of its own."""
    strategy = _strategy()
    model = _model(strategy)
    dataset = strategy.distribute_datasets_from_function(
        lambda context: dataset_of(own_batches(context.input_pipeline_id))
    )
    history = model.fit(dataset, epochs=2, verbose=0)
    return [history.history["loss"], *_weights(model)]


def own_data_alone():
    """The same in one process: the steps are of 8, 4 and 3 rows."""
    first, second = own_batches(0), own_batches(1)
    steps = [
        tuple(np.concatenate(parts) for parts in zip(first[0], second[0])),
        *first[1:],
    ]
    model = _model()
    history = model.fit(dataset_of(steps), epochs=2, verbose=0)
    return [history.history["loss"], *_weights(model)]


def _pipeline(context=None):
    return tfscale.data.pipeline(
        tfscale.data.arrays((X, Y)),
        batch_size=6,
        seed=3,
        input_context=context,
    )


def shuffled_data(index):
    """`tfscale.data`, divided by TensorFlow and by itself."""
    strategy = _strategy()
    model = _model(strategy)
    model.fit(_pipeline(), epochs=2, verbose=0)
    divided = _weights(model)
    dataset = strategy.distribute_datasets_from_function(_pipeline)
    model.fit(dataset, epochs=2, verbose=0)
    return divided + _weights(model)


def shuffled_data_alone():
    """The same in one process."""
    model = _model()
    model.fit(_pipeline(), epochs=2, verbose=0)
    first = _weights(model)
    model.fit(_pipeline(), epochs=2, verbose=0)
    return first + _weights(model)


def by_turns(index):
    """Two strategies in one process, one after the other and back."""
    models = [_model(_strategy()), _model(_strategy())]
    for model in [*models, *models]:
        model.fit(X[:8], Y[:8], batch_size=4, shuffle=False, verbose=0)
    return [w for model in models for w in _weights(model)]


def by_turns_alone():
    """The same in one process, without a strategy."""
    model = _model()
    for _ in range(2):
        model.fit(X[:8], Y[:8], batch_size=4, shuffle=False, verbose=0)
    return _weights(model) * 2


def by_hand(index):
    """Sums, means and gathered values of all replicas, in a loop of one's own.

    The rows are 0 to 6, of which the last worker has fewer.
    """
    strategy = tfscale.MeshStrategy(tfscale.device_mesh(data=4))
    dataset = (
        tf.data.Dataset.range(7).map(lambda x: tf.cast(x, tf.float32)).batch(7)
    )
    (values,) = strategy.experimental_distribute_dataset(dataset)

    @tf.function
    def step(values):
        def on_replica(x):
            context = tf.distribute.get_replica_context()
            place = tf.cast(context.replica_id_in_sync_group, tf.float32)
            return tf.reduce_sum(x), place, context.all_reduce("SUM", x[:1])

        total, place, _ = strategy.run(on_replica, args=(values,))
        return (
            strategy.reduce("SUM", total, axis=None),
            strategy.reduce("MEAN", place, axis=None),
            strategy.reduce("MEAN", values, axis=0),
            strategy.gather(values, axis=0),
        )

    total, place, mean, gathered = step(values)
    # All workers had the numbers 0 and 1.
    numbers = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant([float(context.replica_id_in_sync_group)])
    )
    return [
        strategy.reduce("SUM", tf.constant(1.0), axis=None),
        strategy.num_replicas_in_sync,
        total,
        place,
        mean,
        np.sort(gathered),
        strategy.gather(numbers, axis=0),
    ]


def by_hand_alone():
    """What it has to be."""
    return [4.0, 4, 21.0, 1.5, 3.0, np.arange(7.0), np.arange(4.0)]


def saving(index):
    """One worker has written a file; another one may not."""
    strategy = _strategy()
    model = _model(strategy)
    model.fit(X[:2], Y[:2], shuffle=False, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        model.save(os.path.join(folder, "own.keras"))
    path = os.path.join(tempfile.gettempdir(), "one_of_all_workers.weights.h5")
    if strategy.is_chief:
        model.save_weights(path)
    strategy.extended.workers.coordination.check_same("file", path)
    if strategy.is_chief:
        model.save_weights(path)
        os.remove(path)
        return [1.0]
    try:
        model.save_weights(path)
    except ValueError as error:
        return ["Only one worker may write a file" in str(error)]
    return [0.0]


def saving_alone():
    """Whether all was as it should be."""
    return [1.0]


class SumsInStep(keras.Model):
    """Its replicas meet in each microbatch, as those of other workers do."""

    def train_step(self, data):
        logs = super().train_step(data)
        context = tf.distribute.get_replica_context()
        return {**logs, "ones": context.all_reduce("SUM", tf.ones(()))}


def accumulating(_):
    """Batches of 2 rows and 1."""
    strategy = _strategy()
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        plain = workers_rows.dense()
        model = SumsInStep(plain.input, plain.output)
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(
        *(X[:7], Y[:7]),
        batch_size=4,
        shuffle=False,
        verbose=0,
        callbacks=[tfscale.callbacks.GradientAccumulation(2)],
    )
    return _weights(model)


def accumulating_alone():
    """The whole batches."""
    model = _model()
    model.fit(X[:7], Y[:7], batch_size=4, shuffle=False, verbose=0)
    return _weights(model)


def _residual(strategy=None):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        x = keras.Input((5,))
        h = keras.layers.Add()([x, keras.layers.Dense(5)(x)])
        model = keras.Model(x, keras.layers.Dense(3)(h))
        model.compile(
            keras.optimizers.SGD(0.1), "mse", run_eagerly=not strategy
        )
    model.fit(X[:1], Y[:1], verbose=0)
    return [*_weights(model), model.predict(X[:1], verbose=0)]


def one_row(index):
    """Of two workers the second one has none, from the first batch on."""
    return _residual(_strategy())


def _with_dropout():
    """Masks are by the number of a replica among those of all workers."""
    strategy = _strategy()
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
        model.add(keras.layers.Dropout(0.5))
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    return _weights(model)


def _offline(strategy=None):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        x = keras.Input((5,))
        h = keras.layers.Reshape((5, 1))(keras.layers.ReLU()(x + 1.0))
        h = keras.layers.Dense(5)(keras.layers.Masking()(h))  # of the zeros
        h = keras.layers.BatchNormalization()(h)
        h = keras.layers.GlobalAveragePooling1D()(h)
        model = keras.Model(x, [keras.layers.Dense(3)(h), h])
        model.compile(
            loss=["mse", "mae"],
            metrics=[["mae", "categorical_accuracy"], []],
            weighted_metrics=[["mse"], []],
        )
    weights = np.linspace(0.5, 2.0, len(X)).astype("float32")
    found = []
    for rows in (7, 1):  # uneven, and fewer than replicas
        x, y, weight = X[:rows], [Y[:rows], X[:rows]], weights[:rows]
        found += model.evaluate(
            x, y, batch_size=3, sample_weight=[weight, weight], verbose=0
        )
        found += model.predict(x, batch_size=3, verbose=0)
    return found


def offline(index):
    """`evaluate` and `predict`: the whole data set, in each worker."""
    return _offline(_strategy())


def shards(index):
    """The replicas of each worker divide a weight; each worker has all of it.

    Worker 0 has replicas 0 and 1, and worker 1 has 2 and 3.
    """
    mesh, layouts = tfscale.device_mesh(data=4), {"a/kernel": (None, "data")}
    strategy = tfscale.MeshStrategy(mesh, layouts, zero_stage=3)
    model = _model(strategy, workers_rows.adam)
    model.fit(X[:8], Y[:8], batch_size=4, shuffle=False, verbose=0)
    kernel = model.get_layer("a").kernel.value
    return [*_weights(model), *(shard.numpy() for shard in kernel.values)]


def shards_alone():
    """The same in one process, its kernel divided as that of each worker."""
    model = _model(optimizer=workers_rows.adam)
    model.fit(X[:8], Y[:8], batch_size=4, shuffle=False, verbose=0)
    kernel = np.array(model.get_layer("a").kernel)
    return [*_weights(model), *np.split(kernel, 2, axis=1)]


def _adapted(strategy):
    """Batch size and learning rate follow the noise of the gradients."""
    model = _model(strategy)
    noise = tfscale.callbacks.GradientNoiseScale(
        0.5, batch_sizes=(2, 16), learning_rate="sqrt"
    )
    # A gradient that is larger than its noise.
    rows = tfscale.data.arrays(np.tile(X, (2, 1)), np.tile(Y + 1, (2, 1)))
    history = model.fit(
        tfscale.data.pipeline(rows, batch_size=4, seed=1, remainder="drop"),
        epochs=2,
        verbose=0,
        callbacks=[noise],
    ).history
    scale = history["gradient_noise_scale"][-1]
    return [
        history["batch_size"],
        scale,
        model.optimizer.learning_rate,
        *_weights(model),
    ]


def throughput(index):
    """Rows are those of both workers; only worker 0 has the figures."""
    model, begin, times = _model(_strategy()), [], []

    def on_begin(batch, logs=None):
        begin.append(time.monotonic())

    def on_end(batch, logs=None):
        times.append(time.monotonic() - begin[-1])

    clock = keras.callbacks.LambdaCallback(
        on_train_batch_begin=on_begin, on_train_batch_end=on_end
    )
    history = model.fit(
        *(np.tile(X[:8], (8, 1)), np.tile(Y[:8], (8, 1))),
        batch_size=4,
        shuffle=False,
        verbose=0,
        callbacks=[clock, tfscale.callbacks.Throughput()],
    ).history
    if index:
        return [np.array("examples_per_second" in history, "int32") + 1]
    ratio = history["examples_per_second"][0] * np.mean(times[1:]) / 4
    return [np.round(ratio).astype("int32")]


def throughput_alone():
    """In each worker a number that is one if all is well."""
    return [np.array(1, "int32")]


def measured(index):
    """Each worker measures its device; all know both numbers."""
    seconds = 0.1 * (index + 1)
    with mock.patch.object(timing, "seconds_of_product", lambda _: seconds):
        mesh = tfscale.device_mesh(data=2, speeds="measure")
    return [np.array(mesh.speeds)]


def not_dense(strategy=None):
    """Sparse and ragged rows; the last batch has one, which is one worker's."""
    tokens = tf.ragged.range(tf.range(len(X)) % 3 + 1)
    of_one_length = tf.RaggedTensor.from_row_lengths(
        X.ravel(), [X.shape[1]] * len(X)
    )
    results = []
    for x in (tf.sparse.from_dense(X), of_one_length, tokens):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        with strategy.scope() if strategy else contextlib.nullcontext():
            if x is tokens:
                h = inputs = keras.Input((None,))
                h = keras.layers.Embedding(4, 5)(h)
                h = keras.layers.GlobalAveragePooling1D()(h)
            else:
                is_sparse = x is not of_one_length
                h = inputs = keras.Input(X.shape[1:], sparse=is_sparse)
            model = keras.Model(inputs, keras.layers.Dense(Y.shape[1])(h))
            model.compile(
                keras.optimizers.SGD(0.1), "mse", run_eagerly=not strategy
            )
        rows = tf.data.Dataset.from_tensor_slices((x, Y)).batch(len(X) // 2)
        history = model.fit(rows, epochs=2, verbose=0).history
        results += [history["loss"], *_weights(model)]
    return results


CASES = {
    "not dense": (lambda index: not_dense(_strategy()), not_dense),
    "measured speeds": (measured, lambda: [np.array([2.0, 1.0])]),
    "noise": (
        lambda index: _adapted(_strategy()),
        lambda: _adapted(_strategy()),
    ),
    "throughput": (throughput, throughput_alone),
    "shards": (shards, shards_alone),
    "offline": (offline, _offline),
    "dropout": (lambda index: _with_dropout(), _with_dropout),
    "one row": (one_row, _residual),
    "sums in microbatches": (accumulating, accumulating_alone),
    "saving": (saving, saving_alone),
    "own data": (own_data, own_data_alone),
    "shuffled data": (shuffled_data, shuffled_data_alone),
    "by turns": (by_turns, by_turns_alone),
    "by hand": (by_hand, by_hand_alone),
}


# What rows and other cases show too: masks, divided weights, one more strategy,
# and the noise that is measured.
CROSSED = ("noise", "shards", "dropout", "by turns")


def _shuffles(index, seed):
    strategy = _strategy()
    model = _model(strategy)
    tf.random.set_seed(seed)
    if releases.IS_3_15:
        model.fit(X, Y, batch_size=6, verbose=0)
    else:  # All workers shuffle arrays by the number of the epoch.
        rows = tf.data.Dataset.from_tensor_slices((X, Y))
        model.fit(rows.shuffle(len(X)).batch(6), verbose=0)


def _generates(index, folder):
    del index, folder
    _strategy().experimental_distribute_dataset(dataset_of(own_batches(0)))


def _predicts_on_batch(index, folder):
    del index, folder
    _model(_strategy()).predict_on_batch(X)


def _has_other_layers(index, folder):
    del folder
    with _strategy().scope():
        keras.layers.Dense(3 + index, name="other").build((None, 2))


def _has_another_mesh(index, folder):
    del folder
    mesh = tfscale.device_mesh(data=2, model=1 + index)
    tfscale.MeshStrategy(mesh)


def _has_other_batches(index, folder):
    del folder
    strategy = _strategy()
    dataset = tf.data.Dataset.range(8).batch(2 + index, drop_remainder=True)
    strategy.experimental_distribute_dataset(dataset)


def _has_other_batch_sizes(index, folder):
    # Three steps of both: the halves of batches did not belong together.
    del folder
    _model(_strategy()).fit(X, Y, batch_size=6 + index, shuffle=False)


def _has_one_replica_in_each(index, folder):
    del index, folder
    tfscale.MeshStrategy(tfscale.device_mesh(data=2), zero_stage=3)


def _has_other_speeds(index, folder):
    del folder
    mesh = tfscale.device_mesh(data=2, speeds=[1, 2 + index])
    tfscale.MeshStrategy(mesh)


def _divides_by_itself(index, folder, policy):
    """Batches of each worker's own, of which none knows how many rows."""
    del index, folder
    strategy = tfscale.MeshStrategy(tfscale.device_mesh(data=2, speeds=[1, 2]))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = getattr(
        tf.data.experimental.AutoShardPolicy, policy
    )
    data = tf.data.Dataset.from_tensors((X, Y)).with_options(options)
    _model(strategy).fit(data, verbose=0)


def _has_no_whole_rows(index, folder):
    del folder
    devices = [d.name for d in tf.config.list_logical_devices()]
    tfscale.MeshStrategy(
        tfscale.device_mesh(pipeline=2, devices=[devices[0], devices[2]])
    )


def _has_other_microbatches(index, folder):
    del folder
    callback = tfscale.callbacks.GradientAccumulation(1 + index)
    _model(_strategy()).fit(X, Y, verbose=0, callbacks=[callback])


def _has_another_seed(index, folder, way):
    """Some records were seen twice, others never."""
    del folder
    strategy = _strategy()
    model = _model(strategy)

    def pipeline(context=None):
        return tfscale.data.pipeline(
            tfscale.data.arrays((X, Y)),
            batch_size=6,
            seed=index,
            input_context=context,
        )

    data = {
        "given": pipeline,
        "taken": lambda: pipeline().take(2),
        "context": lambda: strategy.distribute_datasets_from_function(pipeline),
    }[way]()
    model.fit(data, verbose=0)


def _trains_differently(index, folder, change):
    """Of two workers the second one has another configuration."""
    del folder
    strategy = _strategy()
    has = {change: index == 1}
    keras.utils.clear_session(free_memory=False)
    with strategy.scope():
        x = keras.Input((5,))
        kind = "relu" if has.get("activation") else "tanh"
        h = keras.layers.Dense(4, activation=kind, name="first")(x)
        h = keras.layers.Dropout(0.2 if has.get("rate") else 0.1)(h)
        outputs = [keras.layers.Dense(3)(h), keras.layers.Dense(3)(h)]
        if has.get("connections"):
            outputs = outputs[::-1]
        model = keras.Model(x, keras.layers.Subtract()(outputs))
        model.compile(
            # The learning rate is a variable: that of worker 0.
            keras.optimizers.SGD(
                0.1, momentum=0.9 if has.get("optimizer") else 0.0
            ),
            _own_loss if has.get("loss") else "mse",
        )
    callbacks = []
    if has.get("callback"):
        callbacks = [keras.callbacks.EarlyStopping("loss", patience=1)]
    if has.get("callback of ours"):
        callbacks = [tfscale.callbacks.BackupAndRestore("/nowhere")]
    model.fit(
        *(X, Y),
        batch_size=6,
        shuffle=False,
        verbose=0,
        epochs=2 if has.get("epochs") else 1,
        validation_data=(X, Y) if has.get("validation") else None,
        callbacks=callbacks,
    )


def _own_loss(y, predicted):
    return keras.losses.mean_squared_error(y, predicted)


def _of_change(change):
    return lambda index, folder: _trains_differently(index, folder, change)


# What is done, and what the error says in each worker.
REFUSED = {
    **{
        f"another seed, {way}": (
            lambda index, folder, way=way: _has_another_seed(
                index, folder, way
            ),
            r"order of `tfscale.data`.*seed=[01]",
        )
        for way in ("given", "taken", "context")
    },
    "an activation": (_of_change("activation"), "same layer 2.*(relu|tanh)"),
    "a dropout rate": (_of_change("rate"), r"same layer 3.*0\.[12]"),
    "connections": (_of_change("connections"), "the same model. Received"),
    "an optimizer": (
        _of_change("optimizer"),
        "same `optimizer` of `compile`.*momentum",
    ),
    "a loss": (_of_change("loss"), "`loss` of `compile`.*(mse|_own_loss)"),
    "a callback": (
        _of_change("callback"),
        "callbacks that train.*(EarlyStopping|worker [01])",
    ),
    "a callback of ours": (
        _of_change("callback of ours"),
        "callbacks that train.*(BackupAndRestore|worker [01])",
    ),
    "epochs": (_of_change("epochs"), "argument `epochs`. Received: [12] in"),
    "validation": (
        _of_change("validation"),
        "argument `validation_data`. Received: (True|False) in",
    ),
    "other microbatches": (
        _has_other_microbatches,
        "must have the same accumulation. Received: num_microbatches=[12]",
    ),
    "a shuffle without a seed": (
        lambda index, folder: _shuffles(index, None),
        "shuffle without one.*`seed=",
    ),
    "shuffles with seeds of their own": (
        lambda index, folder: _shuffles(index, index + 1),
        "must have the same dataset. Received: .*seeds of shuffles",
    ),
    "a generator": (_generates, "must have the same order in all of them"),
    "predict_on_batch": (_predicts_on_batch, "is for one process"),
    "other layers": (
        _has_other_layers,
        r"must have the same variables. Received: .*other/kernel \(2, [34]\)",
    ),
    "another mesh": (_has_another_mesh, "must have the same mesh. Received: "),
    "other batches": (_has_other_batches, "must have the same dataset. Rec"),
    "other batch sizes": (
        _has_other_batch_sizes,
        r"must have the same batches of arrays. Received: of [67] rows",
    ),
    "one replica in each": (
        _has_one_replica_in_each,
        "divides weights over the replicas of a process. Received: one "
        "replica in each worker",
    ),
    "other speeds": (
        _has_other_speeds,
        r"same mesh. Received: .*speeds=\(1.0, [23].0\)",
    ),
    **{
        f"speeds and {policy}": (
            functools.partial(_divides_by_itself, policy=policy),
            f"auto_shard_policy={policy}",
        )
        for policy in ("OFF", "FILE")
    },
    "no whole rows": (_has_no_whole_rows, "must have whole rows of a mesh"),
}


def run(index, folder, names):
    """The results of cases, and what errors said; in a worker."""
    results = {name: CASES[name][0](index) for name in CASES if name in names}
    results = {k: [np.asarray(x) for x in v] for k, v in results.items()}
    for name, (refused, _) in REFUSED.items():
        if name not in names:
            continue
        try:
            refused(index, folder)
            results[name] = "no error"
        except ValueError as error:
            results[name] = str(error)
    return results


def assert_case(test, name, found):
    """Fails unless a case had the numbers of one process, in each worker."""
    expected = CASES[name][1]()
    for index, results in enumerate(found):
        test.assertEqual(len(expected), len(results))
        for place, (a, b) in enumerate(zip(results, expected)):
            same_numbers.assert_close(a, b, f"worker {index}: {name} {place}")
