"""Schedules that a user might write: generators, nothing else is needed."""

import itertools

from tfscale.pipeline.planning.action import Action
from tfscale.pipeline.planning.named_schedules import one_f_one_b
from tfscale.pipeline.planning.schedule import Schedule


def interleaved(num_devices, num_microbatches, num_chunks):
    """Interleaved 1F1B (Narayanan et al. 2021, section 2.2), user-made.

    Device d has the stages d, d + D, d + 2 D, ...; it takes D microbatches
    through one of them, then the same D through the next.
    """
    if num_microbatches % num_devices:
        raise ValueError("Microbatches must come in groups of devices.")
    order = [
        (chunk, group * num_devices + microbatch)
        for group in range(num_microbatches // num_devices)
        for chunk in range(num_chunks)
        for microbatch in range(num_devices)
    ]
    actions = []
    for device in range(num_devices):
        forwards = [Action("F", c * num_devices + device, m) for c, m in order]
        backwards = [
            Action("B", (num_chunks - 1 - c) * num_devices + device, m)
            for c, m in order
        ]
        ahead = 2 * (num_devices - device - 1) + (num_chunks - 1) * num_devices
        ahead = min(ahead, len(order))
        steady = zip(forwards[ahead:], backwards, strict=False)
        actions.append(
            forwards[:ahead]
            + list(itertools.chain.from_iterable(steady))
            + backwards[len(order) - ahead :]
        )
    return Schedule(actions, name="interleaved")


def zero_bubble_h1(num_stages, num_microbatches):
    """ZB-H1 (Qi et al. 2023, section 3.1), user-made.

    1F1B whose weight gradients wait: stage s puts its first s off, so that B
    reaches the first stage sooner, and fills the end with them.
    """
    actions = []
    for stage, one_f_one_b_actions in enumerate(
        one_f_one_b(num_stages, num_microbatches).actions
    ):
        device_actions, waiting = [], []
        for action in one_f_one_b_actions:
            device_actions.append(action)
            if action.kind == "B":
                waiting.append(action._replace(kind="W"))
                if len(waiting) > stage:
                    device_actions.append(waiting.pop(0))
        actions.append(device_actions + waiting)
    return Schedule(actions, name="zb-h1")
