"""Compiles several sources: what all of them import is imported once, and each is compiled in a forked process of its own.

`python -m tests.planted.compile_jobs` reads a list of argument lists of `asv_bench.compiled` from its input, as JSON, and compiles two at
a time. It ends with 1 where one of them failed, and says which.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

_AT_A_TIME = 2


def main() -> int:
    jobs: list[list[str]] = json.load(sys.stdin)
    import torch._dynamo  # noqa: F401
    import triton  # noqa: F401

    # The library under test is each job's own, so that it may not be here yet.
    assert "rapid_llm" not in sys.modules
    waiting, running, failed = list(jobs), {}, []
    while waiting or running:
        while waiting and len(running) < _AT_A_TIME:
            job = waiting.pop(0)
            process = os.fork()
            if process == 0:
                os._exit(_compile(job))
            running[process] = job
        process, status = os.wait()
        job = running.pop(process)
        if status:
            failed.append(job)
    for job in failed:
        print(f"failed: {' '.join(job)}", file=sys.stderr)
    return 1 if failed else 0


def _compile(job: list[str]) -> int:
    from asv_bench import compiled

    try:
        return compiled.main(job)
    except BaseException:
        traceback.print_exc()
        return 70
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
