"""Bytes, seconds and large numbers for people, by hand."""

from forge_core.terminal import clock, count, duration, size


def test_sizes() -> None:
    assert [size(count) for count in (0, 1023, 1024, 3 * 2**30 // 2, 5 * 2**50)] == [
        "0 B",
        "1,023 B",
        "1.00 KiB",
        "1.50 GiB",
        "5,120.00 TiB",
    ]


def test_durations() -> None:
    assert [duration(v) for v in (-1, 0.4, 45, 220, 3723)] == ["0 s", "0 s", "45 s", "3 min 40 s", "1 h 02 min"]
    assert [clock(v) for v in (0.4, 220, 3723)] == ["0:00", "3:40", "1:02:03"]


def test_counts() -> None:
    assert [count(v) for v in (0, 950, 21300, 1.4e6, 2e9)] == ["0", "950", "21.3k", "1.4M", "2.0G"]
