"""Quantities as people read them. Inside the code: bytes, seconds, tokens, FLOPs."""

from __future__ import annotations


def format_bytes(num_bytes: float) -> str:
    """``1610612736`` -> ``'1.50 GiB'``."""
    value, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"


def format_exact(value: float) -> str:
    """``16.0`` -> ``'16'``; a text from which the very number can be read."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def format_count(count: float) -> str:
    """``134515008`` -> ``'134.5M'``."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(count) >= limit:
            return f"{count / limit:.1f}{suffix}"
    return f"{count:.0f}"


def format_flops(flops_per_second: float) -> str:
    """``2.1e9`` -> ``'2.1 GFLOP/s'``."""
    for limit, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if flops_per_second >= limit:
            return f"{flops_per_second / limit:.1f} {prefix}FLOP/s"
    return f"{flops_per_second:.0f} FLOP/s"


def format_seconds(seconds: float) -> str:
    """``3725`` -> ``'1:02:05'``; below an hour ``'02:05'``."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes:02d}:{secs:02d}"
