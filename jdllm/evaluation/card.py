"""What `nvidia-smi` says of the card while something is measured on it: other jobs, clocks, and why they are held down.

Only reads.  Without nvidia-smi (a CPU machine) there are no other jobs and no samples.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import threading
import time
from typing import Any

FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks_throttle_reasons.active")
REASONS = {
    0x04: "power cap", 0x08: "hardware slowdown", 0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown",
    0x80: "power brake",
}  # fmt: skip
"""Bits of clocks_throttle_reasons.active that slow a busy card; idle (1) and set application clocks (2) are not among them."""
EVERY_MS = 500


def other_jobs() -> list[str]:
    """Compute processes on the cards other than this one, as 'pid name, memory'."""
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"]
    listed = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    lines = [line.strip() for line in listed.splitlines() if line.strip()]
    return [line for line in lines if line.split(",")[0].strip() != str(os.getpid())]


@dataclasses.dataclass(frozen=True)
class Sample:
    """The card at one moment (`at` by time.monotonic)."""

    at: float
    sm_mhz: float
    memory_mhz: float
    watts: float
    celsius: float
    reasons: int


def parse(line: str, at: float) -> Sample | None:
    """One line of nvidia-smi's CSV; None for what is no sample."""
    parts = [part.strip() for part in line.split(",")]
    try:
        numbers = [float(part) for part in parts[:4]]
        return Sample(at, *numbers, int(parts[4], 16))
    except (ValueError, IndexError):
        return None


def throttling(samples: list[Sample]) -> list[str]:
    """Names of all reasons that held the clocks down in these samples."""
    bits = 0
    for sample in samples:
        bits |= sample.reasons
    return [name for bit, name in REASONS.items() if bits & bit]


class Watch:
    """Samples of the first card, taken in the background between `with` and its end."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.complaint: str | None = None
        """What nvidia-smi said instead of a sample."""
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Watch:
        if shutil.which("nvidia-smi"):
            query = [
                f"--query-gpu={','.join(FIELDS)}",
                "--format=csv,noheader,nounits",
                "-i",
                "0",
                "-lms",
                str(EVERY_MS),
            ]
            self._process = subprocess.Popen(
                ["nvidia-smi", *query], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _read(self) -> None:
        for line in self._process.stdout:
            sample = parse(line, time.monotonic())
            if sample is not None:
                self.samples.append(sample)
            elif self.complaint is None:
                self.complaint = line.strip()

    def since(self, start: float) -> list[str]:
        """Reasons that held the clocks down after `start` (time.monotonic)."""
        return throttling([sample for sample in self.samples if sample.at >= start])

    def summary(self) -> dict[str, Any]:
        """Ranges over the whole watch, for the record."""
        if not self.samples:
            return {"samples": 0, "complaint": self.complaint}
        ranges = {
            name: [min(values), max(values)]
            for name in ("sm_mhz", "memory_mhz", "watts", "celsius")
            if (values := [getattr(sample, name) for sample in self.samples])
        }
        return {"samples": len(self.samples), **ranges, "throttled_by": throttling(self.samples)}
