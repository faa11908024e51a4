"""Keeps the device busy with copies until its standard input ends: `python busy.py cuda|cpu`; says "busy" once it is.

A script of its own: a planted commit starts it beside its measuring processes, where this package cannot be imported.
"""

from __future__ import annotations

import sys
import threading

import torch

_BYTES = {"cuda": 256 << 20, "cpu": 64 << 20}
_COPIES = 16


def main() -> None:
    device = sys.argv[1]
    torch.set_num_threads(1)
    ended = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    source = torch.zeros(_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    told = False
    while not ended.is_set():
        for _ in range(_COPIES):
            target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        if not told:
            print("busy", flush=True)
            told = True


if __name__ == "__main__":
    main()
