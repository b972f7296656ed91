"""Values that a thread has for a while, such as the model that it traces."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def within(thread: threading.local, **values: Any) -> Iterator[None]:
    """Within it this thread has the values; behind it, what it had before.

    Args:
        thread: Where they are attributes.
        **values: The values, by name.
    """
    own = thread.__dict__
    before = {name: own[name] for name in values if name in own}
    own.update(values)
    try:
        yield
    finally:
        for name in values:
            del own[name]
        own.update(before)
