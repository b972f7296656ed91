"""The positions of an epoch that a worker's batches hold: integers only.

An epoch is a line of positions, 0 to n - 1. The global batch takes the next
`global_batch` of them, and each worker a contiguous slice of that:

    position  0 1 2 3 | 4 5 6 7 | 8 9 ...     global batch 4
    worker 0  0 1     | 4 5     | 8           two workers, slices of 2
    worker 1      2 3 |     6 7 |   9

So the order of the records over all workers does not depend on the number of
workers. A resumed epoch is the same line from `index` on.
"""

import dataclasses
import itertools
from typing import Any
from typing import NamedTuple

REMAINDERS = ("drop", "pad", "keep")


class EpochStart(NamedTuple):
    """Where an iterator begins: integers, or int64 scalar tensors."""

    seed: Any
    epoch: Any
    first: Any  # position
    steps: Any  # left in the epoch
    final: Any  # this worker's last position in the epoch


@dataclasses.dataclass(frozen=True)
class EpochPlan:
    """How one worker divides the epoch."""

    num_records: int  # that this worker's source can read
    # Records that determine the number of steps: `num_records`, unless workers
    # have different files.
    limit: int
    global_batch: int  # positions in a step, over workers that share a line
    num_workers: int  # that share the line
    worker: int
    batches_per_step: int  # of the worker's slice, one for each replica
    remainder: str
    lines: int  # the number of workers if each has its own files, else 1
    sizes: tuple[int, ...] = ()  # records of all workers that have their own

    @property
    def slice_size(self):
        """Positions of a step that are this worker's."""
        return self.global_batch // self.num_workers

    @property
    def batch_size(self):
        """Records in a batch that this worker hands out."""
        return self.slice_size // self.batches_per_step

    @property
    def num_steps(self):
        """Steps of an epoch, the same for every worker."""
        return self.steps_in(self.limit)

    @property
    def num_batches(self):
        """Batches that this worker hands out in an epoch."""
        return self.num_steps * self.batches_per_step

    @property
    def last_start(self):
        """The last position at which there is a step left."""
        lacks = self.global_batch if self.remainder == "drop" else 1
        return self.limit - lacks

    @property
    def end(self):
        """Records over all workers up to the last possible end of a batch."""
        steps = -(-self.limit // self.global_batch)
        return steps * self.global_batch * self.lines

    def steps_in(self, num_records):
        """Steps of a number of records; integers or int64 tensors."""
        if self.remainder == "drop":
            return num_records // self.global_batch
        return -(-num_records // self.global_batch)

    def start(self, seed, epoch, index, minimum=min):
        """The `EpochStart` at a position: integers, or int64 tensors.

        `minimum` is then that of tensors.
        """
        first = index // self.lines
        # The end of an epoch is the beginning of the next.
        over = minimum(first - minimum(first, self.last_start), 1)
        first *= 1 - over
        steps = self.steps_in(self.limit - first)
        begin, size = self.slice_of(steps - 1, first, minimum)
        return EpochStart(
            seed=seed,
            epoch=epoch + over,
            first=first,
            steps=steps,
            final=begin + size - 1,
        )

    def rules_of_end(self, first):
        """Rules by which workers end an epoch from a position on.

        `first` is an integer or an int64 tensor; yields conditions and errors,
        with a `{}` for each of some numbers.
        """
        if self.remainder != "keep":
            return
        steps = [self.steps_in(size - first) for size in self.sizes]
        for one, other in itertools.pairwise(steps):
            yield (
                one == other,
                "Every worker must have as many batches as the others. "
                f"Received: files with {list(self.sizes)} records, from record "
                "{} of each on, remainder='keep'. Use remainder='pad' or "
                "'drop', or shard='records'.",
                [first],
            )
        if self.num_workers == 1:
            return
        last = (self.limit - first) % self.global_batch
        yield (
            (last == 0) | (last >= self.num_workers),
            "Every worker must get a record of the last batch with "
            "remainder='keep'. Received: {} records in it for "
            f"{self.num_workers} workers, from record {{}} of the epoch "
            "on. Use remainder='pad' or 'drop', or another batch size.",
            [last, first],
        )

    def slice_of(self, step, start, minimum=min):
        """First position and size of the worker's slice.

        `step` counts from the position `start` on. Both are as in `start`.
        """
        first = start + step * self.global_batch
        if self.remainder != "keep":
            return first + self.worker * self.slice_size, self.slice_size
        # The last batch is divided as evenly as possible.
        batch = minimum(self.limit - first, self.global_batch)
        if self.num_workers == 1:
            return first, batch
        size, extra = batch // self.num_workers, batch % self.num_workers
        larger = minimum(extra, self.worker)  # slices before this one
        offset = self.worker * size + larger
        return first + offset, size + minimum(extra, self.worker + 1) - larger


def make_plan(
    *,
    num_records,
    batch_size,
    remainder,
    workers=1,
    worker=0,
    replicas=1,
    sizes=None,
):
    """The `EpochPlan` of one of several workers, with equal batches for each.

    `replicas` is the number of replicas of all workers, `sizes` a list of each
    worker's number of records if workers have their own files, else None.
    """
    if remainder not in REMAINDERS:
        raise ValueError(
            f'`remainder` must be "drop", "pad" or "keep". '
            f"Received: remainder={remainder!r}."
        )
    _check_batch_size(batch_size, replicas, workers)
    limit, lines = num_records, 1
    if sizes is not None:
        lines, worker = workers, 0
        if remainder != "keep":
            limit = {"drop": min, "pad": max}[remainder](sizes)
    plan = EpochPlan(
        num_records=num_records,
        limit=limit,
        global_batch=batch_size // lines,
        num_workers=workers // lines,
        worker=worker,
        batches_per_step=replicas // workers,
        remainder=remainder,
        lines=lines,
        sizes=tuple(sizes or ()),
    )
    _check_steps(plan, batch_size)
    return plan


def with_batch_size(plan: EpochPlan, batch_size: int) -> EpochPlan:
    """A plan of the same records in batches of another global size."""
    workers = plan.lines * plan.num_workers
    _check_batch_size(batch_size, workers * plan.batches_per_step, workers)
    plan = dataclasses.replace(plan, global_batch=batch_size // plan.lines)
    _check_steps(plan, batch_size)
    return plan


def _check_batch_size(batch_size, replicas, workers):
    if batch_size < 1 or batch_size % replicas or replicas % workers:
        raise ValueError(
            "The global batch size must be a positive multiple of the number "
            "of replicas, and the number of replicas a multiple of the number "
            f"of workers. Received: batch_size={batch_size}, {replicas} "
            f"replicas, {workers} workers. Use "
            f"{-(-max(batch_size, 1) // replicas) * replicas}."
        )


def _check_steps(plan, batch_size):
    if plan.num_records == 0:
        raise ValueError(
            "The dataset must not be empty. Received: no records. Check the "
            "source, and the split or the files of this worker."
        )
    if plan.num_steps == 0:
        raise ValueError(
            f"An epoch must hold a whole global batch with remainder='drop'. "
            f"Received: {plan.limit} records, batch_size={batch_size}. Use "
            "remainder='pad' or 'keep', or a smaller batch."
        )
    if plan.remainder == "keep" and plan.batches_per_step > 1:
        raise ValueError(
            "With remainder='keep' a worker must have one replica, because "
            "the last batch cannot be divided evenly. Received: "
            f"{plan.batches_per_step} replicas. Use remainder='pad' or 'drop'."
        )
    for condition, error, numbers in plan.rules_of_end(0):
        if not condition:
            raise ValueError(error.format(*numbers))
