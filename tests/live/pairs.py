"""`pairs`: processes of one commit in interleaved pairs, all rows, for the statistics to draw gates from."""

from __future__ import annotations

from typing import Any

from ci.errors import UsageError
from tests.live.asked import Session
from tests.live.measure import Instrument, Source, alone, measured, unmeasured
from tests.statistics import compact

PAIRS = 12
ARMS = ("a", "b")


def order(number: int) -> tuple[str, str]:
    """The arms of pair `number`, from 0: ABBA, so that a drift does not favour one."""
    return ARMS if number % 2 == 0 else (ARMS[1], ARMS[0])


def pairs(session: Session) -> None:
    """Measures pairs until the count or the time is reached; a folder that has some of this commit already goes on.

    Raises:
        OutOfTimeError: Fewer than asked were measured.
        LiveError: A process measured nothing.
        UsageError: The folder's pairs are of another commit or other rows.
    """
    asked, watch = session.asked, session.watch
    wanted = asked.pairs or (1 if asked.quick else PAIRS)
    path = asked.out / f"pairs{compact.SUFFIX}"
    found = compact.read(path) if path.is_file() else []
    commit = session.clone.head
    instrument = Instrument(session.clone.path, asked.select)
    if any(one.record["commit"] != commit or one.label["select"] != asked.select for one in found):
        raise UsageError(f"{path} has pairs of another commit or of other rows: name another --out.")
    sources = {arm: Source(session.clone.checkout_at(session.work / f"arm-{arm}"), commit) for arm in ARMS}
    with alone():
        for number in range(len(found) // 2, wanted):
            of_pair = []
            for arm in order(number):
                with watch.step("process", f"pair {number + 1} of {wanted}, arm {arm}"):
                    record = measured(instrument, sources[arm], watch)
                of_pair.append(compact.Labelled(record, {"pair": number, "arm": arm, "select": asked.select}))
            found += of_pair
            compact.write(path, found)
            session.kept.found = counted(found, watch.longest_s["process"])
            session.write()


def counted(found: list[compact.Labelled], longest_s: float) -> dict[str, Any]:
    """What `pairs.json` says of the processes in the file beside it."""
    return {
        "pairs": len(found) // 2,
        "num_rows": len({row["params"][0] + row["benchmark"] for one in found for row in one.record["rows"] if row["status"] == "ok"}),
        "longest_process_s": round(longest_s, 1),
        "boots": len({one.record["environment"].get("boot_id") for one in found}),
        "unmeasured": sorted({told for one in found for told in unmeasured(one.record)}),
    }
