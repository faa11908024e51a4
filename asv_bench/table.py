"""What a time is worth: work, rows and the printed table. `asv_bench.microbench` hands these names on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CHECK_ORDER = (
    "unit factors (us against ms, GB against GiB)",
    "the FLOP or byte formula of the row",
    "work that the kernel skipped",
    "a working set that stayed in L2",
    "a baseline that does a different operation",
)
"""What to check, in this order, before a row above 100 % of peak is believed."""

STALE_FACTOR = 1.02
"""Over this share of a measured ceiling, the ceiling is at fault."""


@dataclass(frozen=True)
class Work:
    """Theoretical cost of one call: each input read once, each output written once, no redundant FLOPs.

    Args:
        flops: Floating-point operations, or None where they are not the point.
        moved: Bytes read plus bytes written in device memory, or None. Split-K partials and other scratch do not count.
        written: The part of `moved` that is written, or None where nobody says; it chooses the measured ceiling.
    """

    flops: float | None = None
    moved: float | None = None
    written: float | None = None


@dataclass(frozen=True)
class Ceilings:
    """Rates that plain vendor or probe kernels reached on this device in this process, in GB/s.

    Args:
        read: Reading alone.
        write: Writing alone.
        copy: Bytes read plus bytes written of a copy.
    """

    read: float
    write: float
    copy: float

    def rate(self, work: Work) -> float | None:
        """The ceiling for the mix of bytes of `work`: as many reads as writes at the copy rate, the rest at its own."""
        if work.moved is None or work.written is None or not work.moved:
            return None
        read, written = work.moved - work.written, work.written
        both = min(read, written)
        return work.moved / (2 * both / self.copy + (read - both) / self.read + (written - both) / self.write)


@dataclass(frozen=True)
class Row:
    """One line of a table: which kernel, which case, how long, how much work.

    Args:
        impl: The KernelSpec name that was measured, or "vendor:<op>" of a control.
        case: Label that states everything that changes the number.
        us: Median latency of a call in microseconds.
        work: Theoretical cost of the call.
        bottleneck: Class of the row; launch and host rows have no share of a bandwidth.
        peak_gb_per_s, peak_tflop_per_s: Peaks of the device, or None where they are not known.
        ceilings: Rates measured in the same process, or None.
        max_abs_diff: Largest difference from the reference, None for a control.
        flags: Marks such as WARM or FLOOR.
    """

    impl: str
    case: str
    us: float
    work: Work
    bottleneck: str = "read-bandwidth"
    peak_gb_per_s: float | None = None
    peak_tflop_per_s: float | None = None
    ceilings: Ceilings | None = None
    max_abs_diff: float | None = None
    flags: tuple[str, ...] = ()

    @property
    def gb_per_s(self) -> float | None:
        return None if self.work.moved is None else self.work.moved / self.us / 1e3

    @property
    def tflop_per_s(self) -> float | None:
        return None if self.work.flops is None else self.work.flops / self.us / 1e6

    @property
    def calls_per_s(self) -> float:
        return 1e6 / self.us

    @property
    def bandwidth_bound(self) -> bool:
        return self.bottleneck in ("read-bandwidth", "write-bandwidth", "dequant")

    @property
    def peak_fraction(self) -> float | None:
        """Share of the device's peak, or None: on launch and host rows, on a warm row, and where the peak is not known."""
        if "WARM" in self.flags:
            return None
        if self.bandwidth_bound:
            rate, peak = self.gb_per_s, self.peak_gb_per_s
        elif self.bottleneck == "compute":
            rate, peak = self.tflop_per_s, self.peak_tflop_per_s
        else:
            return None
        return None if rate is None or peak is None else rate / peak

    @property
    def copy_fraction(self) -> float | None:
        """Share of the copy rate measured in the same process."""
        if not self._scored or self.gb_per_s is None or self.ceilings is None:
            return None
        return self.gb_per_s / self.ceilings.copy

    @property
    def ceiling_fraction(self) -> float | None:
        """Share of the rate that the same process measured for this mix of reads and writes."""
        ceiling = None if self.ceilings is None else self.ceilings.rate(self.work)
        if not self._scored or self.gb_per_s is None or ceiling is None:
            return None
        return self.gb_per_s / ceiling

    @property
    def stale_ceiling(self) -> bool:
        """Whether the row beats the measured ceiling by more than 2 %: then the ceiling is not what the device can do.

        Only where the peak is known: the ceilings of a shared CPU are as noisy as the rows.
        """
        if self.peak_gb_per_s is None or self.ceiling_fraction is None or self.violation:
            return False
        return self.ceiling_fraction > STALE_FACTOR

    @property
    def marks(self) -> tuple[str, ...]:
        """The flags, with what the figures themselves show."""
        return (*self.flags, *(("STALE-CEILING",) if self.stale_ceiling else ()), *(("VIOLATION",) if self.violation else ()))

    @property
    def _scored(self) -> bool:
        return self.bandwidth_bound and "WARM" not in self.flags

    @property
    def violation(self) -> bool:
        return self.peak_fraction is not None and self.peak_fraction > 1.0


def report(rows: Sequence[Row], *, floor_us: float | None = None) -> str:
    """The table of `rows` as text: throughput first, latency second; violations with the order in which to check them.

    Args:
        rows: In the order to print.
        floor_us: Reading of `bench_host` for nothing, printed beside host rows; it includes the trailing synchronise.
    """
    head = ("case", "kernel", "throughput", "latency", "of peak", "of ceiling", "max |diff|", "flags")
    lines = [head]
    for row in rows:
        lines.append(
            (
                row.case,
                row.impl,
                _throughput(row),
                f"{row.us:,.2f} us",
                _percent(row.peak_fraction),
                _percent(row.ceiling_fraction),
                "" if row.max_abs_diff is None else f"{row.max_abs_diff:.2e}",
                " ".join(row.marks),
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    right = {2, 3, 4, 5, 6}
    text = [
        "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in lines
    ]
    if floor_us is not None:
        text.append(f"floor: bench_host(lambda: None) reads {floor_us:.2f} us, its own synchronise included")
    for row in rows:
        if row.violation and row.peak_fraction is not None:
            text.append(f"VIOLATION: {row.case} reads {row.peak_fraction:.1%} of peak, which no kernel can. Check, in this order:")
            text.extend(f"  {n}. {item}" for n, item in enumerate(CHECK_ORDER, 1))
        elif row.stale_ceiling and row.ceiling_fraction is not None:
            text.append(
                f"STALE-CEILING: {row.case} reads {row.ceiling_fraction:.1%} of the measured ceiling: mend asv_bench/peaks.py's probe"
            )
    return "\n".join(text) + "\n"


def _throughput(row: Row) -> str:
    if row.bottleneck == "compute" and row.tflop_per_s is not None:
        return f"{row.tflop_per_s:,.2f} TFLOP/s"
    if row.bandwidth_bound and row.gb_per_s is not None:
        return f"{row.gb_per_s:,.1f} GB/s"
    return f"{row.calls_per_s:,.0f} calls/s"


def _percent(fraction: float | None) -> str:
    return "" if fraction is None else f"{fraction:.1%}"
