"""Numbers with units: what is read, what is refused, how they are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pulse_rl._util.settings import (
    format_bytes,
    format_duration,
    format_number,
    format_percent,
    parse_seconds,
)
from pulse_rl.errors import InputError
from pulse_rl.study.plan import format_bandwidth, parse_bandwidth, parse_count, parse_share

READ: dict[Callable[[Any], float], dict[Any, float]] = {
    parse_bandwidth: {
        "0.2Gbit": 0.2e9, "50Mbit": 50e6, "50 Mbit/s": 50e6, "50Mbps": 50e6, "10MB/s": 80e6,
        "1kB/s": 8e3, "300 bit/s": 300, "1Gb/s": 1e9, "2e1Mbits": 20e6, "1Tbit": 1e12,
    },
    parse_count: {"7B": 7e9, "0.5B": 5e8, "22.6M": 22.6e6, "3k": 3000, "1234": 1234},
    parse_share: {"0.86%": 0.0086, "0.0086": 0.0086, "100 %": 1.0},
    parse_seconds: {"50": 50, "50s": 50, "20ms": 0.02, "1.5 min": 90, "5m": 300, "2h": 7200,
                    "1d": 86400},
}  # fmt: skip
REFUSED: dict[Callable[[Any], float], tuple[str, ...]] = {
    parse_bandwidth: (
        "", "fast", "50", "50M", "-1Mbit", "0Mbit", "1 Mbit/h", "1e400Mbit", "nanMbit", "9" * 99,
    ),
    parse_count: ("", "B", "7X", "-7B", "0", "0.1", "1e999", "seven"),
    parse_share: ("", "s", "-1s", "nan", "5 years", "1e999", "%"),
    parse_seconds: ("", "s", "-1s", "nan", "5 years", "1e999", "%"),
}  # fmt: skip
WRITTEN: dict[Callable[[float], str], dict[float, str]] = {
    format_bytes: {
        0: "0 B", 999: "999 B", 999.4: "999 B", 999.6: "1 kB", 1000: "1 kB", 63e6: "63 MB",
        12_345_678: "12.3 MB", 999_999_999: "1 GB", 14e9: "14 GB", 2.5e12: "2.5 TB",
        3e15: "3000 TB",
    },
    format_bandwidth: {
        300: "300 bit/s", 98.6e6: "98.6 Mbit/s", 2.19e10: "21.9 Gbit/s", 1e12: "1 Tbit/s",
    },
    format_duration: {
        0: "0 s", 4.2e-5: "42 µs", 0.0123: "12.3 ms", 0.9996: "1 s", 46: "46 s", 89.9: "89.9 s",
        90: "1.5 min", 5400: "1.5 h", 172_800: "2 days",
    },
    format_percent: {
        0: "0%", 0.0335: "3.35%", 0.12e-4: "0.0012%", 0.5: "50%", 0.9926: "99.26%",
        0.99991: "99.991%", 1: "100%",
    },
    format_number: {0.00123456: "0.00123", 1.0: "1", 222.22: "222", 123_456: "123000"},
}  # fmt: skip


def rows(table: dict[Any, Any]) -> list[Any]:
    return [
        pytest.param(call, row, id=f"{call.__name__}-{row}")
        for call in table
        for row in table[call]
    ]


@pytest.mark.parametrize(("parse", "text"), rows(READ))
def test_what_is_read(parse: Callable[[Any], float], text: Any) -> None:
    assert parse(text) == pytest.approx(READ[parse][text])


@pytest.mark.parametrize(("parse", "text"), rows(REFUSED))
def test_what_is_refused(parse: Callable[[Any], float], text: str) -> None:
    words = {parse_bandwidth: "bandwidth", parse_count: "number"}
    with pytest.raises(InputError, match=words.get(parse, ".")):
        parse(text)


@pytest.mark.parametrize(("write", "number"), rows(WRITTEN))
def test_what_is_written(write: Callable[[float], str], number: float) -> None:
    assert write(number) == WRITTEN[write][number]


def test_a_bandwidth_that_was_written_is_read() -> None:
    for number, text in WRITTEN[format_bandwidth].items():
        assert parse_bandwidth(text) == number
