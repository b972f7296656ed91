"""How numbers look in summaries, in the style of `keras.Model.summary`."""


def colored(number) -> str:
    """A number in the color that Keras gives numbers, as markup of rich."""
    return f"[color(34)]{number}[/]"


def readable_bytes(num_bytes: float) -> str:
    """A number of bytes with a unit, as Keras writes it."""
    for unit in ("B", "KB", "MB", "GB"):
        if num_bytes < 1024:
            return f"{num_bytes:.2f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} TB"
