"""Do all workers do the same thing now? Compared before they exchange tensors.

Workers whose programs differ would wait for each other for ever, or add up what
does not belong together. So each says what it is about to do, in the order of
its program, and they compare: worker 0 with all, the others with worker 0.

    worker 0    variable dense/kernel (4, 8)    step of a model, 64 rows
    worker 1    variable dense/kernel (4, 9)    ...
                ▲ named, in both
"""

import logging
import time
from collections.abc import Callable

from tfscale import _internals

_PREFIX = "tfscale/agreement"
_MILLISECONDS = 1_000
_PATIENCE_SECONDS = 15.0


class Agreement:
    """What workers say of what they are about to do.

    Args:
        count: Number of workers.
        index: Which of them this is.
        check_all_there: Raises if one of them is gone.
        say: Is told who is waited for.

    Attributes:
        num_checks: How many it has begun.
    """

    def __init__(
        self,
        count: int,
        index: int,
        check_all_there: Callable[[], None],
        say: Callable[[str], None] = logging.warning,
    ):
        self._count = count
        self._index = index
        self._check_all_there = check_all_there
        self._say = say
        self.num_checks = 0

    def check(self, subject: str, fact: str) -> None:
        """Returns once those that are compared have said the same.

        Args:
            subject: What it is about, "variables" say.
            fact: What has to be the same in all workers.

        Raises:
            ConnectionError: If another worker is gone.
            ValueError: If another worker says something else.
        """
        self.num_checks += 1
        said = f"{subject}\n{fact}"
        _internals.put_key_value(self._key(self._index), said)
        others = range(1, self._count) if self._index == 0 else [0]
        for other in others:
            found = self._wait_for(other, subject)
            if found != said:
                raise ValueError(self._difference(said, other, found))

    def _key(self, index):
        return f"{_PREFIX}/{self.num_checks}/{index}"

    def _wait_for(self, other, subject):
        start, told = time.monotonic(), False
        while True:
            found = _internals.get_key_value(self._key(other), _MILLISECONDS)
            if found is not None:
                return found
            self._check_all_there()
            if not told and time.monotonic() - start > _PATIENCE_SECONDS:
                told = True
                self._say(
                    f"Worker {self._index} waits for worker {other}, which "
                    f"has not come as far as this yet: {subject}."
                )

    def _difference(self, said, other, found):
        subject, _, fact = said.partition("\n")
        other_subject, _, other_fact = found.partition("\n")
        if subject == other_subject:
            return (
                f"All workers must have the same {subject}. Received: {fact} "
                f"in worker {self._index}, {other_fact} in worker {other}. Run "
                "the same program with the same settings in all of them."
            )
        return (
            "All workers must do the same things in the same order. Received: "
            f"{subject} ({fact}) in worker {self._index}, {other_subject} "
            f"({other_fact}) in worker {other}. What trains or makes variables "
            "must not depend on which worker it is."
        )
