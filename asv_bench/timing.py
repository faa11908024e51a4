"""The result of a timer. `asv_bench.microbench` hands these names on."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Call = Callable[[], object]
"""What a timer times, and what it does between: a call without arguments, whose result is not looked at."""

MIN_SAMPLES = 5
_FLOOR_FACTOR = 1.5
_LAUNCH_FACTOR = 0.85
_QUIET_QUANTILE = 0.1


class TimingError(RuntimeError):
    """A timer could not give an honest number; the message says why."""


@dataclass(frozen=True)
class Timing:
    """Result of a timer: samples in microseconds a call, and how they were taken.

    Attributes:
        timer: Name of the function that took it.
        instrument: "device" where the device's clock was read, "wall-clock" where the host's was.
        samples_us: A sample is one interval, divided by the calls in it; of `bench_host` it is the lower quintile of one block of calls.
        floor_us: What the same instrument reads for nothing, or None where it was not measured.
        l2: "cold", "warm", or "untouched" where the timer does not care.
        estimator: How the reading is made from the samples: their median, or their first decile ("quiet"), which is the
            reading that the host gives when its neighbours leave it alone.
        host_us: Time in which the host enqueues one call, or None where it does not matter.
        disturbed: Neighbours slowed the host down all the time, so that the reading is too high.
        host_limited: The device waited for the host, so that the samples hold the host's time.
    """

    timer: str
    instrument: Literal["device", "wall-clock"]
    samples_us: tuple[float, ...]
    floor_us: float | None = None
    l2: Literal["cold", "warm", "untouched"] = "cold"
    estimator: Literal["median", "quiet"] = "median"
    host_us: float | None = None
    host_limited: bool = False
    disturbed: bool = False

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)

    @property
    def reading_us(self) -> float:
        """The figure that stands for the samples."""
        return self.median_us if self.estimator == "median" else self.quantile_us(_QUIET_QUANTILE)

    def quantile_us(self, q: float) -> float:
        """Sample quantile by linear interpolation."""
        return quantile(self.samples_us, q)

    @property
    def tick_us(self) -> float:
        """Resolution of the samples: the clock's on the host, the smallest step between two samples on a device; 0 where none shows."""
        if self.instrument == "wall-clock":
            return time.get_clock_info("perf_counter").resolution * 1e6
        distinct = sorted(set(self.samples_us))
        return min((high - low for low, high in itertools.pairwise(distinct)), default=0.0)

    @property
    def near_floor(self) -> bool:
        """Whether the reading is within 1.5x of what the instrument reads for nothing."""
        return self.floor_us is not None and self.reading_us <= _FLOOR_FACTOR * self.floor_us

    def check(self) -> None:
        """Refuses a reading that is no number.

        Raises:
            TimingError: Fewer samples than the minimum; one that is NaN, infinite, zero or negative; a device reading under that of a
                kernel that does nothing, which means that nothing was launched.
        """
        if len(self.samples_us) < MIN_SAMPLES:
            raise TimingError(f"{self.timer} took {len(self.samples_us)} samples, fewer than {MIN_SAMPLES}: raise its rep_ms")
        bad = [s for s in self.samples_us if not math.isfinite(s) or s <= 0]
        if bad:
            raise TimingError(f"{self.timer} read {bad[0]!r} us: the timed region holds no work that this instrument can see")
        if self.instrument == "device" and self.floor_us is not None and self.reading_us < _LAUNCH_FACTOR * self.floor_us:
            raise TimingError(
                f"{self.timer} read {self.reading_us:.3g} us, and a kernel that does nothing reads {self.floor_us:.3g} us: the timed"
                " region launches nothing"
            )


def quantile(values: tuple[float, ...] | list[float], q: float) -> float:
    """Sample quantile by linear interpolation between order statistics."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
