"""Durations as Go programs write them, and sizes as Kubernetes does."""

from __future__ import annotations

import re

_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(h|ms|m|s|us|µs|ns)")
_BYTES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def seconds(text: str) -> float:
    """A duration such as `50ms` or `1m30s`, in seconds. Raises ValueError."""
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError("is not a duration; give one such as 50ms or 1m30s")
    return round(sum(float(number) * _SECONDS[unit] for number, unit in parts), 9)


def size(text: str) -> int:
    """A size such as `16Mi`, `16MiB` or `16000000`, in bytes. Raises ValueError."""
    found = re.fullmatch(r"(\d{1,12})(k|M|G|Ki|Mi|Gi|)B?", text.strip())
    if found is None:
        raise ValueError("is not a size; give one such as 16MiB")
    return int(found[1]) * _BYTES[found[2]]
