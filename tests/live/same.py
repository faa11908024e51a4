"""`same`: whole gates of a commit that changes nothing."""

from __future__ import annotations

from tests.live.asked import Session
from tests.live.whole_gate import keep, run_gate, summary


def same(session: Session) -> None:
    """Runs gates of an empty commit on HEAD against HEAD, one after the other, each measured anew.

    Against the stored baseline where the checkout has a valid one of this device, else in pairs with the merge-base; the verdict's `mode`
    says which. A folder that has some gates already goes on, up to the number that is asked for. With `--cold` each has a Triton cache of
    its own, empty at first, so that every kernel is built anew.

    Raises:
        OutOfTimeError: Not all gates came to their end.
        LiveError: A gate left no verdict.
    """
    asked, watch = session.asked, session.watch
    session.clone.branch("same", "changes nothing")
    session.kept.take_up("gates")
    gates = session.kept.found.setdefault("gates", [])
    wanted = asked.gates or 1
    for number in range(len(gates) + 1, wanted + 1):
        env = {"TRITON_CACHE_DIR": str(session.work / f"cache-{number}")} if asked.cold else {}
        report = session.work / f"report-{number}"
        with watch.step("gate", f"gate {number} of {wanted}{', with an empty Triton cache' if asked.cold else ''}"):
            ended = run_gate(session.clone.path, report, asked.gate_arguments(), watch, env)
        gates.append({"cold": asked.cold, **summary(ended)})
        keep(ended, asked.out, f"same-{number}")
        session.write()
        watch.say(f"gate {number}: exit {gates[-1]['exit_code']}, {gates[-1]['verdict']}: {gates[-1]['reason']}")
