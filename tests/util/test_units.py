"""Numbers with units: what is read, what is refused, how they are written."""

from __future__ import annotations

import pytest

from pulse_rl._util.settings import (
    format_bandwidth,
    format_bytes,
    format_duration,
    format_number,
    format_percent,
    parse_bandwidth,
    parse_count,
    parse_seconds,
    parse_share,
)
from pulse_rl.errors import InputError


@pytest.mark.parametrize(
    ("text", "bits"),
    [("0.2Gbit", 0.2e9), ("50Mbit", 50e6), ("50 Mbit/s", 50e6), ("50Mbps", 50e6), ("10MB/s",
    80e6), ("1kB/s", 8e3),
     ("300 bit/s", 300), ("1Gb/s", 1e9), ("2e1Mbits", 20e6), ("1Tbit", 1e12), (5e6, 5e6)],
)  # fmt: skip
def test_bandwidths(text: str | float, bits: float) -> None:
    assert parse_bandwidth(text) == pytest.approx(bits)


@pytest.mark.parametrize(
    "text",
    ["", "fast", "50", "50M", "-1Mbit", "0Mbit", "1 Mbit/h", "1e400Mbit", "nanMbit", "9" * 99],
)
def test_bad_bandwidths(text: str) -> None:
    with pytest.raises(InputError, match="bandwidth"):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("7B", 7_000_000_000),
        ("0.5B", 500_000_000),
        ("22.6M", 22_600_000),
        ("3k", 3000),
        ("1234", 1234),
    ],
)
def test_counts(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "B", "7X", "-7B", "0", "0.1", "1e999", "seven"])
def test_bad_counts(text: str) -> None:
    with pytest.raises(InputError, match="number"):
        parse_count(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (999.4, "999 B"), (999.6, "1 kB"), (1000, "1 kB"), (63_000_000,
    "63 MB"),
     (12_345_678, "12.3 MB"), (999_999_999, "1 GB"), (14e9, "14 GB"), (2.5e12, "2.5 TB"), (3e15,
     "3000 TB")],
)  # fmt: skip
def test_bytes_are_written_with_three_digits(nbytes: float, text: str) -> None:
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("bits_per_second", "text"),
    [(300, "300 bit/s"), (98.6e6, "98.6 Mbit/s"), (2.19e10, "21.9 Gbit/s"), (1e12, "1 Tbit/s")],
)
def test_bandwidths_are_written_with_three_digits(bits_per_second: float, text: str) -> None:
    assert format_bandwidth(bits_per_second) == text
    assert parse_bandwidth(text) == bits_per_second


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (4.2e-5, "42 µs"), (0.0123, "12.3 ms"), (0.9996, "1 s"), (46, "46 s"), (89.9,
    "89.9 s"),
     (90, "1.5 min"), (5400, "1.5 h"), (172_800, "2 days")],
)  # fmt: skip
def test_durations_are_written_in_the_unit_that_suits_them(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0, "0%"),
        (0.0335, "3.35%"),
        (0.12e-4, "0.0012%"),
        (0.5, "50%"),
        (0.9926, "99.26%"),
        (0.99991, "99.991%"),
        (1, "100%"),
    ],
)
def test_shares_near_1_keep_the_digits_that_tell_them_from_it(share: float, text: str) -> None:
    assert format_percent(share) == text


def test_numbers_have_no_exponent_where_they_can_be_read_without() -> None:
    assert [format_number(x) for x in (0.00123456, 1.0, 222.22, 123_456)] == [
        "0.00123",
        "1",
        "222",
        "123000",
    ]


@pytest.mark.parametrize(("text", "share"), [("0.86%", 0.0086), ("0.0086", 0.0086), ("100 %", 1.0)])
def test_shares(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("50", 50), ("50s", 50), ("20ms", 0.02), ("1.5 min", 90), ("2h", 7200), ("1d", 86400)],
)
def test_seconds(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "-1s", "nan", "5 years", "1e999", "%"])
def test_what_is_neither_a_share_nor_seconds(text: str) -> None:
    for parse in (parse_share, parse_seconds):
        with pytest.raises(InputError):
            parse(text)
