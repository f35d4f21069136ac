"""Bytes, seconds and large numbers as people read them."""


def size(count: int) -> str:
    """Bytes in binary units with two digits after the point: `14.96 GiB`, `950 B`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{count:,} B" if unit == "B" else f"{value:,.2f} {unit}"


def duration(seconds: float) -> str:
    """`45 s`, `3 min 40 s`, or `1 h 02 min` from an hour on."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def clock(seconds: float) -> str:
    """`3:40`, or `1:02:03` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def count(value: float) -> str:
    """A number in at most four digits and a suffix: `950`, `21.3k`, `1.4M`."""
    for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.1f}{suffix}"
    return f"{value:.0f}"
