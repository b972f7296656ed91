"""Which records of a source a worker reads: some of all files, or own files."""

import tensorflow as tf

from tfscale.data.sources.source import Source


def of_worker(
    source: Source, shard: str, context: tf.distribute.InputContext
) -> tuple[Source, list[int] | None]:
    """A worker's source and, where files are dealt out, each worker's records.

    Raises:
        ValueError: If there are no files to deal out.
    """
    if shard not in ("records", "files"):
        raise ValueError(
            f'`shard` must be "records" or "files". Received: shard={shard!r}.'
        )
    workers = context.num_input_pipelines
    if shard == "records" or workers == 1:
        return source, None
    if source.split is None:
        raise ValueError(
            "Only a source of several files can be sharded by files. "
            f"Received: shard='files' with {source.kind}. Use shard='records'."
        )
    own, sizes = source.split(workers, context.input_pipeline_id)
    if 0 in sizes:
        raise ValueError(
            "Every worker must have a file of its own with shard='files'. "
            f"Received: {workers} workers, of which {sizes.count(0)} would "
            "have no record. Use shard='records', or write more files."
        )
    return own, sizes
