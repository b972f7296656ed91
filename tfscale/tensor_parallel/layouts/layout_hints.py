"""What a pattern of a layout map that matches no variable may have meant."""

import difflib
import re
from collections.abc import Sequence

_NUMBER = re.compile(r"_\d+(?=/|$)")


def hint(pattern: str, paths: Sequence[str]) -> str:
    """What of the paths of variables comes near, in words; may be empty."""
    whole = [p for p in paths if re.fullmatch(pattern, p)]
    if whole:
        return (
            f" (it matches {whole[0]!r}, which was not made under the "
            "strategy, or has a key of its own)"
        )
    inside = [p for p in paths if re.search(pattern, p)]
    if inside:
        return (
            f" (it matches only a part of {inside[0]!r}; begin or end it with "
            "'.*')"
        )
    plain = re.sub(r"\.\*|\.\+|[\\^$()\[\]?]", "", pattern)
    numbered = [
        p for p in paths if _NUMBER.sub("", p) == _NUMBER.sub("", plain)
    ]
    if numbered:
        return (
            f" (it matches {numbered[0]!r} but for a number, which Keras gives "
            "layers of one name in the order in which they are made: name them "
            "yourself, pass the function that builds the model to "
            "`tfscale.auto_layout_map`, or call `keras.utils.clear_session()` "
            "before the model is built)"
        )
    near = difflib.get_close_matches(plain, paths, n=3, cutoff=0.0)
    return f" (nearest: {', '.join(map(repr, near))})" if near else ""
