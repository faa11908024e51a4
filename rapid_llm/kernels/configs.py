"""What can be tuned of a kernel's launch, the rule that holds where nothing is tuned, and what a search tries. Free of triton and torch."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

__all__ = ["DecodeConfig", "WriteConfig", "choose_config", "choose_num_splits", "choose_write_config"]

_MAX_GROUP_BLOCK = 64
_MIN_DOT = 16
_MAX_SPLITS = 128
_MIN_TILES_PER_SPLIT = 2
_MAX_ELEMENTS_PER_PROGRAM = 4096
_FEW_TOKENS = 4096
_WARPS = (1, 2, 4, 8, 16, 32)
_MAX_STAGES = 8


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Tile sizes of `paged_decode_kernel`.

    Attributes:
        block_m: Query heads a program.
        block_n: Tokens a tile.
        block_d: Columns a load: head_dim, or for an e4m3 cache its half, rounded up to a power of two.
        num_warps, num_stages: As Triton means them.
        num_splits: Splits a sequence; None leaves it to `choose_num_splits`.
    """

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int
    num_splits: int | None = None

    @classmethod
    def default(cls, sizes: Mapping[str, int], kv_dtype: str) -> DecodeConfig:
        """The rule's config.

        Args:
            sizes: Of the request: num_q_heads, num_kv_heads, head_dim.
            kv_dtype: As of the request.
        """
        return choose_config(sizes["num_q_heads"] // sizes["num_kv_heads"], sizes["head_dim"], e4m3=kv_dtype == "e4m3")

    @classmethod
    def candidates(cls, sizes: Mapping[str, int], kv_dtype: str) -> list[DecodeConfig]:
        """What a search tries, the rule's config first; sizes as of `default`, and max_seq_len."""
        rule = cls.default(sizes, kv_dtype)
        made = [rule]
        for block_n, num_warps, num_stages in itertools.product((32, 64, 128), (4, 8), (2, 3, 4)):
            most = min(_MAX_SPLITS, -(-max(1, sizes["max_seq_len"]) // block_n))
            for num_splits in (None, *(n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n <= most)):
                made.append(dataclasses.replace(rule, block_n=block_n, num_warps=num_warps, num_stages=num_stages, num_splits=num_splits))
        return list(dict.fromkeys(made))

    def problem(self, sizes: Mapping[str, int], kv_dtype: str) -> str | None:
        """Why this config gives no right result for a request; None where it does."""
        rule = self.default(sizes, kv_dtype)
        if self.block_d != rule.block_d:
            return f"block_d is {self.block_d} where these heads take {rule.block_d}"
        for name in ("block_m", "block_n"):
            if (block := getattr(self, name)) < _MIN_DOT or block & (block - 1):
                return f"{name} is {block}, and a dot takes powers of two from {_MIN_DOT}"
        if self.num_splits is not None and not 1 <= self.num_splits <= _MAX_SPLITS:
            return f"num_splits is {self.num_splits}, outside 1 to {_MAX_SPLITS}"
        return _launch_problem(self.num_warps, self.num_stages)


@dataclasses.dataclass(frozen=True)
class WriteConfig:
    """Tile sizes of `kv_write_kernel`.

    Attributes:
        tokens: Tokens a program.
        block: Elements of a token's heads a program, a power of two.
        num_warps: As Triton means it.
    """

    tokens: int
    block: int
    num_warps: int = 4

    @classmethod
    def default(cls, sizes: Mapping[str, int], kv_dtype: str) -> WriteConfig:
        """The rule's config.

        Args:
            sizes: Of the request: num_tokens, num_kv_heads, head_dim.
            kv_dtype: As of the request; the rule does not depend on it.
        """
        del kv_dtype
        return choose_write_config(sizes["num_tokens"], sizes["num_kv_heads"] * sizes["head_dim"])

    @classmethod
    def candidates(cls, sizes: Mapping[str, int], kv_dtype: str) -> list[WriteConfig]:
        """What a search tries, the rule's config first; sizes as of `default`."""
        rule = cls.default(sizes, kv_dtype)
        whole = _next_power_of_2(sizes["num_kv_heads"] * sizes["head_dim"])
        blocks = sorted({min(whole, block) for block in (256, 512, 1024, 2048, 4096)})
        made = [cls(*values) for values in itertools.product((1, 2, 4, 8), blocks, (1, 2, 4, 8))]
        return list(dict.fromkeys([rule, *(config for config in made if config.problem(sizes, kv_dtype) is None)]))

    def problem(self, sizes: Mapping[str, int], kv_dtype: str) -> str | None:
        """Why this config cannot serve a request; None where it can."""
        del sizes, kv_dtype
        for name in ("tokens", "block"):
            if (size := getattr(self, name)) < 1 or size & (size - 1):
                return f"{name} is {size} and no power of two"
        if self.tokens * self.block > 4 * _MAX_ELEMENTS_PER_PROGRAM:
            return f"a program would write {self.tokens * self.block} elements, more than {4 * _MAX_ELEMENTS_PER_PROGRAM}"
        return _launch_problem(self.num_warps, 1)


def choose_config(group: int, head_dim: int, *, e4m3: bool) -> DecodeConfig:
    """Tiles that fit the shared memory of every supported device (99 KiB a program at compute capability 8.6).

    Args:
        group: Query heads a K/V head.
        head_dim: Columns of a head.
        e4m3: Whether the cache holds e4m3 bytes.
    """
    columns = head_dim // 2 if e4m3 else head_dim
    wide = columns > 128
    return DecodeConfig(
        block_m=max(_MIN_DOT, min(_next_power_of_2(group), _MAX_GROUP_BLOCK)),
        block_n=32 if wide else 64,
        block_d=max(_MIN_DOT, _next_power_of_2(columns)),
        num_warps=4,
        num_stages=2 if wide else 3,
    )


def choose_num_splits(programs: int, max_seq_len: int, num_sms: int, *, block_n: int) -> int:
    """Splits a sequence that fill about one wave of resident programs, two tiles each at least.

    It sees host integers only: the same call always makes the same grid, whatever the lengths on the device are.

    Args:
        programs: Programs of one split.
        max_seq_len: Width of the row table, in tokens.
        num_sms: Multiprocessors of the device.
        block_n: Tokens a tile.
    """
    tiles = -(-max_seq_len // block_n)
    wanted = 2 * num_sms // max(1, programs)
    return max(1, min(wanted, _MAX_SPLITS, -(-tiles // _MIN_TILES_PER_SPLIT)))


def choose_write_config(num_tokens: int, num_elements: int) -> WriteConfig:
    """Few tokens need many programs to fill the device; many tokens amortise a program over several.

    Args:
        num_tokens: Tokens of the call.
        num_elements: Elements of a token's K heads.
    """
    block = min(_next_power_of_2(num_elements), _MAX_ELEMENTS_PER_PROGRAM)
    tokens = 1 if num_tokens <= _FEW_TOKENS else max(1, min(4, _MAX_ELEMENTS_PER_PROGRAM // block))
    return WriteConfig(tokens, block)


def _launch_problem(num_warps: Any, num_stages: Any) -> str | None:
    if num_warps not in _WARPS:
        return f"num_warps is {num_warps}, not one of {', '.join(map(str, _WARPS))}"
    if not 1 <= num_stages <= _MAX_STAGES:
        return f"num_stages is {num_stages}, outside 1 to {_MAX_STAGES}"
    return None


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 0 else 1
