"""What can be tuned of a kernel's launch, the rule that holds where nothing is tuned, and what a search tries. Free of triton and torch."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

__all__ = [
    "VARIANTS",
    "DecodeConfig",
    "WriteConfig",
    "choose_block_s",
    "choose_config",
    "choose_num_programs",
    "choose_num_splits",
    "choose_write_config",
]

VARIANTS = ("split", "swap", "stream", "stream-swap")
"""How decode attention is computed: "swap" lets tokens ride in the dots' M instead of query heads, "stream" deals the tiles of all
sequences evenly to programs instead of a number of splits to each sequence."""


_ONE_BYTE = ("e4m3", "int8")
"""Dtypes of a cache that are a byte. Tiles of int8 are by the rules that e4m3 was measured for: its widening takes no more instructions."""
_MAX_GROUP_BLOCK = 64
_MIN_DOT = 16
_MAX_STREAM_BATCH = 4096
_MAX_STREAM_TILES = 2**31
_FEWEST_REGISTERS, _MOST_REGISTERS = 32, 255
_REGISTERS_OF_THREE = 168
"""Registers a thread with which three programs of four warps fit a multiprocessor's 65,536."""
_MAX_PROGRAMS_PER_SM = 8
_STREAMED_PROGRAMS, _STREAMED_TOKENS = 128, 4096
"""From this many programs on, with tables for so many tokens, the rule takes a stream: a sequence has too few splits to even out lengths
that differ. On an H200 a stream took .95 (float16) and .83 (e4m3) of the time of the best splits that were tried at 32 ragged lengths up
to 32k, at equal lengths 1.00 to 1.06 of it from 8k tokens on and 1.07 to 1.17 at 1k (docs/performance.md)."""
_SWAPPED_TOKENS = 4096
"""From so many tokens on, the rule lets tokens ride in the dots' M where a few sequences' float16 cache is read: on an H200 .97 of the time
at one sequence of 8k and 32k tokens, 1.02 of it at 1k (docs/performance.md)."""
_LONG_CELLS = 2**20
"""Tokens times programs from which the rule has four programs a multiprocessor read an e4m3 cache: they even out what each of them takes,
and more parts to merge no longer count."""
_FEW_PROGRAMS = 128
_FEWEST_PROGRAMS = 16
_MAX_SPLITS = 128
_MOST_MERGED = 16
_MIN_TILES_PER_SPLIT = 2
_MAX_ELEMENTS_PER_PROGRAM = 4096
_FEW_TOKENS, _MANY_TOKENS = 256, 8192
"""Up to so few tokens, and from more than so many on, a float16 K/V write has more warps than between."""
_ELEMENTS_PER_WARP = 256
"""A 16-byte load of each thread."""
_WARPS = (1, 2, 4, 8, 16, 32)
_MAX_STAGES = 8


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Variant and tile sizes of decode attention.

    Attributes:
        block_m: Query heads a program.
        block_n: Tokens a tile.
        block_d: Columns a load: head_dim, or for a cache of bytes its half, rounded up to a power of two.
        num_warps, num_stages: As Triton means them.
        num_splits: Splits a sequence; None leaves it to `choose_num_splits`. A stream has none.
        variant: One of `VARIANTS`.
        programs_per_sm: Programs that a multiprocessor is to have at a time, for the rules of numbers of splits and programs.
        block_s: Parts of a sequence that are merged at a time; None leaves it to `choose_block_s`.
        tiles_ahead: Tiles that the entries of the table are loaded ahead, 1 or 2.
        max_registers: Most registers a thread, which also keeps the assembler from spilling some to have fewer; None leaves it to it.
    """

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int
    num_splits: int | None = None
    variant: str = "split"
    programs_per_sm: int = 2
    block_s: int | None = None
    max_registers: int | None = None
    tiles_ahead: int = 1

    @property
    def swapped(self) -> bool:
        """Whether tokens ride in the dots' M."""
        return self.variant.endswith("swap")

    @property
    def streamed(self) -> bool:
        """Whether tiles are dealt to programs whatever the lengths are."""
        return self.variant.startswith("stream")

    @classmethod
    def default(cls, sizes: Mapping[str, int], kv_dtype: str) -> DecodeConfig:
        """The rule's config.

        Args:
            sizes: Of the request: batch, max_seq_len, num_q_heads, num_kv_heads, head_dim.
            kv_dtype: As of the request.
        """
        group = sizes["num_q_heads"] // sizes["num_kv_heads"]
        config = _config_for(sizes, kv_dtype)
        programs = sizes["batch"] * sizes["num_kv_heads"] * -(-group // config.block_m)
        stream = _config_for(sizes, kv_dtype, "stream")
        many = sizes["batch"] > 1 and programs >= _STREAMED_PROGRAMS
        if many and sizes["max_seq_len"] >= _STREAMED_TOKENS and stream.problem(sizes, kv_dtype) is None:
            return stream
        if kv_dtype in _ONE_BYTE:
            return dataclasses.replace(config, programs_per_sm=4) if programs * sizes["max_seq_len"] >= _LONG_CELLS else config
        if programs > _FEWEST_PROGRAMS:
            return config
        # Of few: fewer parts to merge are worth more than more programs.
        variant = "swap" if sizes["max_seq_len"] >= _SWAPPED_TOKENS else "split"
        few = _config_for(sizes, kv_dtype, variant)
        return dataclasses.replace(few, programs_per_sm=1, tiles_ahead=2)

    @classmethod
    def candidates(cls, sizes: Mapping[str, int], kv_dtype: str) -> list[DecodeConfig]:
        """What a search tries, the rule's config first; sizes as of `default`."""
        tokens = (32, 64) if _config_for(sizes, kv_dtype).block_n == 32 else (64, 128)
        made = [cls.default(sizes, kv_dtype)]
        for variant in VARIANTS:
            rule = _config_for(sizes, kv_dtype, variant)
            for block_n, (num_warps, num_stages) in itertools.product(tokens, ((4, 2), (4, 3), (4, 4), (8, 3))):
                # A small tile has nothing for eight warps to do; four stages of the large one leave a multiprocessor one program.
                if (block_n, num_warps) == (tokens[0], 8) or (block_n, num_stages) == (tokens[1], 4):
                    continue
                for ahead in (1, 2) if (block_n, num_warps, num_stages) == (tokens[0], 4, 3) else (rule.tiles_ahead,):
                    sizes_of: dict[str, Any] = {"block_n": block_n, "num_warps": num_warps, "num_stages": num_stages, "tiles_ahead": ahead}
                    tile = dataclasses.replace(rule, **sizes_of)
                    if rule.streamed:
                        made += [dataclasses.replace(tile, programs_per_sm=n) for n in (2, 3) if sizes["batch"] > 1]
                    else:
                        made += [dataclasses.replace(tile, num_splits=n) for n in _splits_to_try(sizes, rule.block_m, block_n)]
        return [config for config in dict.fromkeys(made) if config.problem(sizes, kv_dtype) is None]

    def problem(self, sizes: Mapping[str, int], kv_dtype: str) -> str | None:
        """Why this config gives no right result for a request; None where it does."""
        if self.variant not in VARIANTS:
            return f"variant is {self.variant!r}, not one of {', '.join(VARIANTS)}"
        rule = _config_for(sizes, kv_dtype)
        if self.block_d != rule.block_d:
            return f"block_d is {self.block_d} where these heads take {rule.block_d}"
        for name, least in (("block_m", _MIN_DOT), ("block_n", _MIN_DOT), ("block_s", 1)):
            block: int | None = getattr(self, name)
            if block is not None and (block < least or block & (block - 1)):
                return f"{name} is {block}, and the {self.variant} variant takes powers of two from {least}"
        if self.streamed and self.num_splits is not None:
            return f"num_splits is {self.num_splits}, and a stream has no splits"
        if self.streamed and sizes["batch"] > _MAX_STREAM_BATCH:
            return f"a stream serves a batch of at most {_MAX_STREAM_BATCH}, not {sizes['batch']}"
        if self.streamed and sizes["batch"] * -(-sizes["max_seq_len"] // self.block_n) >= _MAX_STREAM_TILES:
            return f"a stream counts its tiles in 32 bits, and {sizes['batch']} sequences of {sizes['max_seq_len']} tokens have more"
        if self.num_splits is not None and not 1 <= self.num_splits <= _MAX_SPLITS:
            return f"num_splits is {self.num_splits}, outside 1 to {_MAX_SPLITS}"
        if not 1 <= self.programs_per_sm <= _MAX_PROGRAMS_PER_SM:
            return f"programs_per_sm is {self.programs_per_sm}, outside 1 to {_MAX_PROGRAMS_PER_SM}"
        if self.tiles_ahead not in (1, 2):
            return f"tiles_ahead is {self.tiles_ahead}, neither 1 nor 2"
        if self.max_registers is not None and not _FEWEST_REGISTERS <= self.max_registers <= _MOST_REGISTERS:
            return f"max_registers is {self.max_registers}, outside {_FEWEST_REGISTERS} to {_MOST_REGISTERS}"
        return _launch_problem(self.num_warps, self.num_stages)


@dataclasses.dataclass(frozen=True)
class WriteConfig:
    """Tile sizes of `kv_write_kernel`.

    Attributes:
        tokens: Tokens a program.
        block: Elements of a token's heads a program, a power of two.
        num_warps: As Triton means it.
        halves: How many of K and V a program writes: 1 or 2.
    """

    tokens: int
    block: int
    num_warps: int = 4
    halves: int = 1

    @classmethod
    def default(cls, sizes: Mapping[str, int], kv_dtype: str) -> WriteConfig:
        """The rule's config.

        Args:
            sizes: Of the request: num_tokens, num_kv_heads, head_dim.
            kv_dtype: As of the request.
        """
        return choose_write_config(sizes["num_tokens"], sizes["num_kv_heads"] * sizes["head_dim"], one_byte=kv_dtype in _ONE_BYTE)

    @classmethod
    def candidates(cls, sizes: Mapping[str, int], kv_dtype: str) -> list[WriteConfig]:
        """What a search tries, the rule's config first; sizes as of `default`."""
        rule = cls.default(sizes, kv_dtype)
        whole = _next_power_of_2(sizes["num_kv_heads"] * sizes["head_dim"])
        blocks = sorted({min(whole, block) for block in (256, 512, 1024, 2048, 4096)})
        made = [cls(*values) for values in itertools.product((1, 2, 4, 8), blocks, (1, 2, 4, 8, 16), (1, 2))]
        # A thread has one to eight 16-byte loads in flight, so that it neither idles nor spills.
        sized = [config for config in made if 1 <= config.elements // (_ELEMENTS_PER_WARP * config.num_warps) <= 8]
        return list(dict.fromkeys([rule, *(config for config in sized if config.problem(sizes, kv_dtype) is None)]))

    @property
    def elements(self) -> int:
        """Elements that a program writes."""
        return self.tokens * self.block * self.halves

    def problem(self, sizes: Mapping[str, int], kv_dtype: str) -> str | None:
        """Why this config cannot serve a request; None where it can."""
        del sizes, kv_dtype
        for name in ("tokens", "block"):
            if (size := getattr(self, name)) < 1 or size & (size - 1):
                return f"{name} is {size} and no power of two"
        if self.halves not in (1, 2):
            return f"halves is {self.halves}, neither 1 nor 2"
        if self.elements > 4 * _MAX_ELEMENTS_PER_PROGRAM:
            return f"a program would write {self.elements} elements, more than {4 * _MAX_ELEMENTS_PER_PROGRAM}"
        return _launch_problem(self.num_warps, 1)


def choose_config(group: int, head_dim: int, *, one_byte: bool, variant: str = "split") -> DecodeConfig:
    """Tiles that fit the shared memory of every supported device (99 KiB a program at compute capability 8.6).

    Args:
        group: Query heads a K/V head.
        head_dim: Columns of a head.
        one_byte: Whether the cache holds bytes, e4m3 or int8 ones.
        variant: One of `VARIANTS`.
    """
    columns = head_dim // 2 if one_byte else head_dim
    wide = columns > 128
    block_m = max(_MIN_DOT, min(_next_power_of_2(group), _MAX_GROUP_BLOCK))
    streamed = variant.startswith("stream")
    return DecodeConfig(
        block_m=block_m,
        block_n=32 if wide else 64,
        block_d=max(_MIN_DOT, _next_power_of_2(columns)),
        num_warps=4,
        num_stages=2 if wide else 3,
        variant=variant,
        # What fits an H200: a program of a stream takes some 70 KiB of shared memory and at most 168 registers a thread.
        programs_per_sm=3 if streamed else 2,
        # With more query heads than a dot needs, the assembler spills in the loop on sm_86 when it is left to itself.
        max_registers=_REGISTERS_OF_THREE if block_m > _MIN_DOT else None,
        # Half the bytes of a tile take half the time, and the table is waited for; a stream reads it anew at each sequence.
        tiles_ahead=2 if one_byte or streamed else 1,
    )


def _config_for(sizes: Mapping[str, int], kv_dtype: str, variant: str = "split") -> DecodeConfig:
    """The tiles of `choose_config` for a request's sizes and cache dtype."""
    group = sizes["num_q_heads"] // sizes["num_kv_heads"]
    config = choose_config(group, sizes["head_dim"], one_byte=kv_dtype in _ONE_BYTE, variant=variant)
    # Left to itself, the assembler takes 176 registers of an int8 stream on sm_100, and spills on sm_86, sm_89 and sm_120.
    return dataclasses.replace(config, max_registers=_REGISTERS_OF_THREE) if kv_dtype == "int8" else config


def choose_num_splits(programs: int, max_seq_len: int, num_sms: int, *, block_n: int, programs_per_sm: int = 2) -> int:
    """Splits a sequence that fill about one wave of resident programs: of one tile each where that is less, else of two at least.

    It sees host integers only: the same call always makes the same grid, whatever the lengths on the device are.

    Args:
        programs: Programs of one split.
        max_seq_len: Width of the row table, in tokens.
        num_sms: Multiprocessors of the device.
        block_n: Tokens a tile.
        programs_per_sm: Programs that a multiprocessor is to have at a time.
    """
    tiles = -(-max_seq_len // block_n)
    wanted = programs_per_sm * num_sms // max(1, programs)
    if wanted > _MOST_MERGED:
        wanted -= wanted % _MOST_MERGED  # the merge has no turn for one part
    most = tiles if tiles <= wanted else -(-tiles // _MIN_TILES_PER_SPLIT)
    return max(1, min(wanted, _MAX_SPLITS, most))


def choose_block_s(num_parts: int) -> int:
    """Parts that the merge takes at a time: all of them where they are few enough for the registers, since each further turn waits once
    more for memory. Of three values only, so that a kernel is compiled for few.

    Args:
        num_parts: Parts of a sequence.
    """
    return next((block for block in (2, 4) if num_parts <= block), _MOST_MERGED)


def choose_num_programs(head_blocks: int, num_tokens: int, num_sms: int, *, block_n: int, programs_per_sm: int = 2) -> int:
    """Programs a block of query heads of a stream: one wave of resident programs, but no more than there can be tiles.

    Args:
        head_blocks: Blocks of query heads.
        num_tokens: Tokens that the row table has room for.
        num_sms, block_n, programs_per_sm: As of `choose_num_splits`.
    """
    return max(1, min(programs_per_sm * num_sms // max(1, head_blocks), -(-num_tokens // block_n)))


def _splits_to_try(sizes: Mapping[str, int], block_m: int, block_n: int) -> list[int | None]:
    """The rule's number, which makes some 250 programs on a large device, and powers of two that make about half and twice as many."""
    programs = sizes["batch"] * sizes["num_kv_heads"] * -(-sizes["num_q_heads"] // sizes["num_kv_heads"] // block_m)
    most = min(_MAX_SPLITS, -(-max(1, sizes["max_seq_len"]) // block_n))
    powers = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n <= most]
    beside = [n for n in powers if _FEW_PROGRAMS <= n * programs <= 1.5 * _FEW_PROGRAMS or n * programs >= 3 * _FEW_PROGRAMS]
    return [None, *(beside[:2] or powers[-1:])]


def choose_write_config(num_tokens: int, num_elements: int, *, one_byte: bool) -> WriteConfig:
    """A program writes K and V of one token. On an H200 with four warps, K and V apart took 1.15 to 1.21 times as long with few 16-bit
    tokens and 1.03 to 1.05 with many, over e4m3 bytes .99 to 1.03; more tokens a program were at most .4 % faster (docs/performance.md).

    Args:
        num_tokens: Tokens of the call.
        num_elements: Elements of a token's K heads.
        one_byte: Whether the cache holds bytes, e4m3 or int8 ones.
    """
    block = min(_next_power_of_2(num_elements), _MAX_ELEMENTS_PER_PROGRAM)
    warps = block // _ELEMENTS_PER_WARP
    if not one_byte and num_tokens > _FEW_TOKENS:
        warps = 2 * warps if num_tokens > _MANY_TOKENS else warps // 2
    return WriteConfig(1, block, max(1, min(16, warps)), halves=2)


def _launch_problem(num_warps: Any, num_stages: Any) -> str | None:
    if num_warps not in _WARPS:
        return f"num_warps is {num_warps}, not one of {', '.join(map(str, _WARPS))}"
    if not 1 <= num_stages <= _MAX_STAGES:
        return f"num_stages is {num_stages}, outside 1 to {_MAX_STAGES}"
    return None


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 0 else 1
