"""The words that a report uses and what they mean; a page lists those that stand on it."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Word:
    """A term or some that belong together, what they mean, and the pattern by which they are found on a page."""

    term: str
    meaning: str
    pattern: str = ""

    def stands_in(self, text: str) -> bool:
        """Whether the text uses it; without a pattern, whether it has one of the terms as they are written."""
        pattern = self.pattern or "|".join(re.escape(term) for term in self.term.split(", "))
        return re.search(rf"(?<!\w)(?:{pattern})(?!\w)", text) is not None


WORDS: tuple[Word, ...] = (
    Word("Row", "One timed case: calls of one kernel on one shape, dtype and layout, all in one line of a table.", "[Rr]ows?"),
    Word(
        "Compiled row",
        "What the compiler makes of one case for one architecture: the launches of the call and the figures of their machine code. Exact, "
        "and no time.",
        "[Cc]ompiled rows?|Compiled, exact",
    ),
    Word(
        "Base, merge-base, HEAD",
        "HEAD is the change. The merge-base is the commit it branched off from. The base is what HEAD is held against: the merge-base, or "
        "the stored baseline.",
        "[Bb]ase|merge-base|HEAD",
    ),
    Word(
        "Baseline",
        "What was accepted, a file on the base branch: times of one device, or compiled figures of one architecture.",
        "[Bb]aselines?",
    ),
    Word("Pair", "HEAD and merge-base, measured one after the other by fresh processes. Changes are taken pair by pair.", "[Pp]airs?"),
    Word(
        "Change of latency",
        "Relative to the base; a plus is slower. In pairs it is a mean over the pairs with far-off ones clipped; against a stored "
        "baseline, what controls and floors show of the machine is taken off first.",
    ),
    Word(
        "was",
        "This run's figure taken back by the change: what the base would have read beside this run. It is not the median of the base's own "
        "processes, which were measured in other moments.",
    ),
    Word(
        "Band",
        "Shaded in the pictures: the changes with which the row passes, either too small to count or within chance. The tick is the base, "
        "the dot this run; slower is on the right.",
        "[Bb]and",
    ),
    Word(
        "By chance",
        "How often noise alone would show as much in this one row. A row counts as regressed only where noise would do so anywhere, in all "
        "rows together, in fewer than 1 of 100 runs; so 1 in 100 of one row is not enough. With n pairs no row can show less than 1 in "
        "2 to the n.",
    ),
    Word("MDE80", "The smallest regression that this row detects with probability 0.8; over 5 % a row is WIDE, over 10 % BLIND."),
    Word(
        "Floor of a row",
        "The smallest change of latency that counts as one, whatever chance says.",
        "over the floor|under the floor|floor of|[Ss]mallest change that counts",
    ),
    Word(
        "Instrument's floor",
        "What the timer reads for a call that does nothing; a reading near it is the timer's own.",
        "Instrument's floor|, floor",
    ),
    Word(
        "Latency over its floor",
        "Of a row that the host bounds: its latency divided by what an empty call took in the same moments: a slow host is no slow row.",
        "over (?:its|that) floor|floors?,? that host rows",
    ),
    Word(
        "Share of peak",
        "Of the device's theoretical peak. Absent where no peak is known, and for launch and host rows, which it does not bound.",
    ),
    Word(
        "Share of copy rate",
        "Of the copy bandwidth under Measured ceilings, bytes read plus bytes written.",
        "Share of copy rate|copy rate",
    ),
    Word(
        "max_abs_diff",
        "Largest difference from a slow float64 reference, checked before and after the timing. A row beyond the tolerance of its case is "
        "UNVERIFIED and has no number; a coarse dtype has a large difference and a large tolerance.",
    ),
    Word(
        "KernelSpec", "The name of the implementation that served the call; torch_ and sdpa are PyTorch's, triton_ this project's kernels."
    ),
    Word(
        "Control",
        "A vendor operation that no change of this code can touch. It is not judged: when it moves, the machine moved.",
        "[Cc]ontrols?",
    ),
    Word("Waiver", "An entry in a baseline that excuses one row, with a reason and a date.", "[Ww]aivers?|waived?"),
    Word("sm_NN", "A GPU architecture by its compute capability: sm_90 is Hopper (H200).", r"sm_\d+\w*"),
    Word("T, B, S", "In a case: tokens written, sequences in the batch, cached tokens of a sequence.", r"[TBS]=\d[\d.]*"),
    Word("e4m3, fp8", "8-bit floats with 4 exponent and 3 mantissa bits, widened when they are read."),
    Word("combined, split", "K and V in one buffer; each in a buffer of its own."),
    Word("fragmented, contiguous", "The cache rows of a sequence lie scattered; in order, one after the other."),
    Word("cold, warm", "The inputs are not in the cache (L2, on a CPU the last level) when the call starts; they are."),
    Word(
        "state",
        "Of the allocator: bump hands out fresh rows, run_search looks for a free run, fragmented gathers scattered rows.",
        "state=|bump|run_search",
    ),
    Word("PASS", "No slower than its base, as far as this row can tell: its MDE80 says how far."),
    Word(
        "REGRESSED",
        "Slower than the base by more than its floor and beyond chance; or, of a compiled row, a figure that gates got worse. It fails.",
    ),
    Word("CHANGED", "A compiled row that differs with no figure better or worse that gates. Nothing to do; look here when a time moves."),
    Word("SKIPPED", "Not measured, for the reason given; it says nothing of the change."),
    Word("IMPROVED", "Faster than its band; never fails, and asks for a fresh baseline."),
    Word("CLEARED", "It looked slower at first, and more measurements rule out a slow-down as large as its floor."),
    Word("UNCONFIRMED", "Slower, but not beyond doubt or not by enough to count; listed, not failing."),
    Word("NEW, MISSING", "Only this run has the row; only the base has it."),
    Word("FAILED, INVALID", "It ended without a number; its number cannot be used, for the reason given."),
    Word(
        "UNVERIFIED, VIOLATION",
        "The result differs from the reference; the throughput is above what the device can do. Neither is a measurement.",
    ),
    Word("NOT COMPARABLE", "Measured by another protocol version or in another unit than the base."),
    Word("IDENTICAL", "Both commits launch exactly the same; of a timed row, on the same inputs: a control more."),
    Word("FLOOR", "As short as the instrument can see: the floor is what is reported."),
    Word("HOST-LIMITED", "The host enqueued more slowly than the device ran."),
    Word("NEAR LIMIT", "Close to the smallest change that counts, on either side of it."),
    Word("WARM", "L2 was not flushed: an optimistic bound, never held against a cold row."),
    Word(
        "WIDE, BLIND",
        "MDE80 over 5 %; over 10 %: a smaller slow-down would most likely not be found. Never beside REGRESSED: what was found stands.",
    ),
    Word("SCREENED", "Suspicious in the first run, and therefore looked at again."),
    Word("DECLARED NOISE", "Too few runs to learn this row's noise from; a declared one is used."),
    Word("MOVED", "A control, or a row with unchanged launches, beyond its own band: the machine changed, not the code."),
    Word(
        "CREEP",
        "Slower than the row's anchor by 3 % or more, beyond chance, whatever its refreshed band says; over 5 % it fails unless waived.",
    ),
    Word("WAIVED", "The baseline excuses this row, for a reason and until a date; it is shown, and does not fail the run."),
)


def words_of(page: str) -> list[Word]:
    """The words that a page's text uses, in the order of `WORDS`.

    Args:
        page: HTML, without a list of words.
    """
    text = re.sub(r"\s+", " ", re.sub(r"<(?:style|svg)\b.*?</(?:style|svg)>|<[^>]*>", " ", page, flags=re.DOTALL))
    return [word for word in WORDS if word.stands_in(text)]
