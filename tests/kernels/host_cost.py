"""What a public call costs the host beside the Triton launch that it ends in."""

from collections.abc import Callable

import torch

from asv_bench.microbench import bench
from asv_bench.trial_peers import bare_launch

MOST_OF_A_BARE_LAUNCH = 1.3
_TURNS = 9


def host_ratio(call: Callable[[], None]) -> float:
    """Host time of the call over that of its bare launch: of readings in turn the least of each, which neighbours disturbed least."""
    for _ in range(2):
        call()
    bare = bare_launch(call)
    turns = [(_host_us(call), _host_us(bare)) for _ in range(_TURNS)]
    public_us, bare_us = min(turn[0] for turn in turns), min(turn[1] for turn in turns)
    print(f"host of the public op {public_us:.1f} us, of the bare launch {bare_us:.1f} us: {public_us / bare_us:.2f}")
    return public_us / bare_us


def _host_us(call: Callable[[], object]) -> float:
    host_us = bench(call, device=torch.device("cuda"), rep_ms=8).host_us
    assert host_us is not None
    return host_us
