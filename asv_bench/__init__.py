"""The instrument and the suites: how the kernels of `rapid_llm` are measured.

Importing this package registers the throughput benchmark type with asv's runner. It imports neither torch nor the library under test:
asv imports the suites many times in a run, and only the measuring process (`asv_bench.worker`) needs them.
"""

from __future__ import annotations

import contextlib

with contextlib.suppress(ModuleNotFoundError):  # scripts run without asv installed
    from asv_bench import throughput

    throughput.register()
