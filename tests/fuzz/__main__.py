"""`python -m tests.fuzz --inputs 200000`: many mutated files of every kind; each finding with the numbers that repeat it."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter

from tests.fuzz.targets import Finding, check_mutated, targets

SLOW_S = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--target", help="one kind of file only")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    kinds = [target for target in targets() if options.target in (None, target.name)]
    read: Counter[str] = Counter()
    findings: dict[str, str] = {}
    began_s = time.monotonic()
    done = 0
    while done < options.inputs and time.monotonic() - began_s < options.seconds:
        target = kinds[done % len(kinds)]
        mutations = [(draw.randrange(10), draw.randrange(1 << 20), draw.randrange(1 << 20)) for _ in range(draw.choice((1, 1, 2, 3)))]
        one_s = time.monotonic()
        try:
            read[target.name] += check_mutated(target, mutations)
            if time.monotonic() - one_s > SLOW_S:
                raise Finding(f"{target.name}: took {time.monotonic() - one_s:.1f} s")
        except Finding as finding:
            findings.setdefault(str(finding)[:160], f"{target.name} {mutations}")
        done += 1
    print(f"{done} inputs of seed {options.seed} in {time.monotonic() - began_s:.0f} s, {sum(read.values())} read, the rest refused")
    for name, count in sorted(read.items()):
        print(f"  {name}: {count} read")
    for what, how in findings.items():
        print(f"FINDING: {what}\n  {how}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
