"""A schedule is data: per device, the order of its actions, see action.py."""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

from tfscale.integers import check_integer
from tfscale.schedules.action import KINDS
from tfscale.schedules.action import Action
from tfscale.schedules.action import dependencies


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The actions of each device in order, checked when it is created.

    The numbers of stages, microbatches and devices follow from the actions.
    Several stages may share a device (interleaved schedules); a stage has
    exactly one.

    Args:
        actions: For each device (pipeline rank) the list of its actions in
            the order in which it does them: `Action`s, or strings like
            `"F1.3"`.
            With a U for each stage and batch it runs several batches, with
            equally many microbatches each.
        name: Its name in summaries and timelines.
        vertical_sync: Only with U: whether all stages use the oldest weights
            that one of them has for a batch, in place of its own newest ones.

    Raises:
        ValueError: If an action is missing, repeated or on a second device,
            if a U does not come after the last backward of its batch,
            or if the devices would wait for each other forever. The message
            names the action, its device and position (both from 0).

    Example: two stages that treat each microbatch by itself.

    >>> schedule = Schedule(
    ...     [
    ...         ["F0.0", "B0.0", "F0.1", "B0.1"],
    ...         ["F1.0", "B1.0", "F1.1", "B1.1"],
    ...     ],
    ...     name="one_by_one",
    ... )
    >>> schedule.num_stages, schedule.num_microbatches
    (2, 2)
    >>> " ".join(str(action) for action in schedule.order())
    'F0.0 F1.0 B1.0 B0.0 F0.1 F1.1 B1.1 B0.1'
    """

    actions: Sequence[Sequence[Any]]
    name: str = "custom"
    vertical_sync: bool = False

    def __post_init__(self):
        actions = tuple(
            tuple(
                Action.parse(
                    action if isinstance(action, str) else str(Action(*action))
                )
                for action in device_actions
            )
            for device_actions in self.actions
        )
        object.__setattr__(self, "actions", actions)
        self.validate()

    @property
    def num_devices(self) -> int:
        """Number of devices of one replica (size of the pipeline axis)."""
        return len(self.actions)

    @functools.cached_property
    def num_stages(self) -> int:
        """Number of stages of the model."""
        return 1 + max(action.stage for action in self._positions)

    @functools.cached_property
    def num_microbatches(self) -> int:
        """Number of microbatches of all batches of the schedule."""
        return 1 + max(a.microbatch for a in self._positions if a.kind != "U")

    @functools.cached_property
    def num_batches(self) -> int:
        """Number of batches: 1, or that of the updates of a stage."""
        updates = {a.microbatch for a in self._positions if a.kind == "U"}
        return len(updates) or 1

    @property
    def has_updates(self) -> bool:
        """Whether stages update their weights within the schedule."""
        return Action("U", 0, 0) in self._positions

    @property
    def microbatches_per_batch(self) -> int:
        """Number of microbatches of one batch."""
        return self.num_microbatches // self.num_batches

    def version(self, stage: int, batch: int) -> int:
        """The version of its weights that a stage uses for a batch.

        It is the number of updates that the stage has made before the first
        forward of the batch; with `vertical_sync` the least of all stages.
        """
        stages = range(self.num_stages) if self.vertical_sync else (stage,)
        first = batch * self.microbatches_per_batch
        return min(
            sum(
                self._positions[Action("U", each, done)]
                < self._positions[Action("F", each, first)]
                for done in range(batch)
            )
            for each in stages
        )

    @functools.cached_property
    def stage_devices(self) -> tuple[int, ...]:
        """The index of the device of each stage."""
        device_of = {
            action.stage: device
            for action, (device, _) in self._positions.items()
        }
        return tuple(device_of[stage] for stage in range(self.num_stages))

    def staleness(self, stage: int) -> int:
        """How many updates the weights of a backward are behind, at most.

        A stage keeps that many versions of its weights and the newest one.
        """
        return max(b - self.version(stage, b) for b in range(self.num_batches))

    def has_weight_action(self, stage: int, microbatch: int) -> bool:
        """Whether the weight gradients have a W apart from their B."""
        return Action("W", stage, microbatch) in self._positions

    def order(self) -> Iterator[Action]:
        """Every action, after all that it depends on.

        The order is that of starting times when every action takes one unit
        of time, devices in order where times are equal; so a program that
        emits work in this order starts on no device late.
        """
        return itertools.chain.from_iterable(self._steps())

    def validate(self) -> None:
        """Raises the `ValueError` of the class if the schedule is wrong."""
        if not self.actions or not all(self.actions):
            raise ValueError(
                "A schedule must give every device at least one action. "
                f"Received: {len(self.actions)} devices with "
                f"{[len(a) for a in self.actions]} actions. Remove idle "
                "devices."
            )
        self._check_positions()
        done = set(self.order())
        if len(done) < len(self._positions):
            raise ValueError(self._explain_deadlock(done))

    @functools.cached_property
    def _positions(self) -> dict[Action, tuple[int, int]]:
        return {
            action: (device, position)
            for device, device_actions in enumerate(self.actions)
            for position, action in enumerate(device_actions)
        }

    def _at(self, action: Action) -> str:
        device, position = self._positions[action]
        return f"{action} (device {device}, position {position})"

    def _check_positions(self) -> None:
        counts = collections.Counter(itertools.chain(*self.actions))
        for action, count in counts.items():
            if count > 1:
                raise ValueError(
                    "A schedule must have each action once. Received: "
                    f"{self._at(action)}, which occurs {count} times. Remove "
                    "all but one."
                )
        for stage, microbatch, kind in itertools.product(
            range(self.num_stages), range(self.num_microbatches), KINDS
        ):
            first = Action("F", stage, 0)
            action = Action(kind, stage, microbatch)
            if action not in self._positions:
                if kind == "W":
                    continue
                raise ValueError(
                    "A schedule must have an F and a B for each stage and "
                    f"microbatch. Received: {self.num_stages} stages and "
                    f"{self.num_microbatches} microbatches without {action}. "
                    f"Add it, on the device of stage {stage}."
                )
            if self._positions[action][0] != self._positions[first][0]:
                raise ValueError(
                    "All actions of a stage must be on one device. Received: "
                    f"{self._at(action)} but {self._at(first)}. Move one of "
                    "them."
                )
        if any(action.kind == "U" for action in self._positions):
            self._check_updates()

    def _check_updates(self):
        if self.num_microbatches % self.num_batches:
            raise ValueError(
                "All batches of a schedule must have the same number of "
                f"microbatches. Received: {self.num_microbatches} microbatches "
                f"and updates of {self.num_batches} batches."
            )
        size = self.microbatches_per_batch
        for stage, batch in itertools.product(
            range(self.num_stages), range(self.num_batches)
        ):
            update = Action("U", stage, batch)
            if update not in self._positions:
                raise ValueError(
                    "A schedule must have a U for each stage and batch, or "
                    f"none. Received: {self.num_batches} batches without "
                    f"{update}. Add it."
                )
            needed = [Action("U", stage, batch - 1)]
            for microbatch in range(batch * size, (batch + 1) * size):
                needed += (Action(kind, stage, microbatch) for kind in "BW")
            last = max(self._positions.get(each, (-1, -1)) for each in needed)
            # On another device it compares as less or more, too.
            if not (
                last[0] == self._positions[update][0]
                and last < self._positions[update]
            ):
                raise ValueError(
                    "A stage must update its weights on its device, after all "
                    "backwards of the batch and the previous update. "
                    f"Received: {self._at(update)}. Move it back."
                )

    def _steps(self) -> Iterator[list[Action]]:
        """Yields what starts at times 0, 1, ... if each action takes 1.

        Ends early when no device can go on.
        """
        done = set()
        positions = [0] * self.num_devices
        while True:
            step = []
            for device, device_actions in enumerate(self.actions):
                if positions[device] == len(device_actions):
                    continue
                action = device_actions[positions[device]]
                if done.issuperset(dependencies(action, self.num_stages)):
                    step.append(action)
                    positions[device] += 1
            if not step:
                return
            done.update(step)
            yield step

    def _explain_deadlock(self, done: set[Action]) -> str:
        # From any device that cannot go on, follow what it waits for until
        # a device comes up again: those devices wait for each other.
        waits = {}
        for device, device_actions in enumerate(self.actions):
            blocked = next((a for a in device_actions if a not in done), None)
            if blocked is not None:
                needs = dependencies(blocked, self.num_stages)
                missing = next(a for a in needs if a not in done)
                waits[device] = blocked, missing
        device, seen = min(waits), []
        while device not in seen:
            seen.append(device)
            device = self._positions[waits[device][1]][0]
        circle = "; ".join(
            f"{self._at(blocked)} waits for {self._at(missing)}"
            for blocked, missing in (
                waits[d] for d in seen[seen.index(device) :]
            )
        )
        return (
            "Every action of a schedule must come after what it needs: F after "
            "the F of the stage before, B after its F and the B of the stage "
            "after, W after its B. Received a schedule that never ends: "
            f"{circle}. Move the first of these actions back, or what it waits "
            "for forward."
        )


def check_sizes(num_stages: int, num_microbatches: int) -> None:
    """Raises a TypeError or ValueError if there is nothing to schedule."""
    check_integer("num_stages", num_stages)
    check_integer("num_microbatches", num_microbatches)
