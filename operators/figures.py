"""Numbers, times and texts as people read them. Pure."""

from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float]) -> str:
    """One bar per value between the smallest and the largest of them."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)


def number(value: float) -> str:
    return f"{value:.3f}"


def count(value: float) -> str:
    """ "43", "11.2k"."""
    return f"{value / 1000:.1f}k" if value >= 10_000 else f"{value:.0f}"


def size(bytes: float) -> str:
    """ "312 B", "41.0 GiB"."""
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = min(max(int(bytes).bit_length() - 1, 0) // 10, len(units) - 1)
    return f"{bytes / 1024**power:.{1 if power else 0}f} {units[power]}"


def duration(seconds: float) -> str:
    """ "4s", "3m 20s", "7h 12m", "9d 3h"; of a time to come, by a clock that is behind, "0s"."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60}s"
    if whole < 48 * 3600:
        return f"{whole // 3600}h {whole % 3600 // 60}m"
    return f"{whole // 86400}d {whole % 86400 // 3600}h"


def one_line(text: str, longest: int) -> str:
    """The text in one line that a terminal only prints: whoever wrote it may have put in what moves its cursor."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}…"
