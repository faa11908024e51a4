"""The live sequences of a batch: which cache rows each holds, in the form that the kernels read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rapid_llm.errors import OutOfRowsError, RapidLLMError
from rapid_llm.kv_cache import KVCacheManager

__all__ = ["DecodeStep", "PrefillStep", "SequenceTable"]


@dataclass(frozen=True)
class PrefillStep:
    """Where the K and V of one new sequence's tokens go.

    Attributes:
        slot_mapping: int32, [num_tokens].
    """

    slot_mapping: torch.Tensor


@dataclass(frozen=True)
class DecodeStep:
    """Where the K and V of one new token a sequence go, and what the tokens attend.

    Attributes:
        slot_mapping: int32, [batch].
        row_table: int32, [batch, max_seq_len].
        seq_lens: int32, [batch], the new token included.
    """

    slot_mapping: torch.Tensor
    row_table: torch.Tensor
    seq_lens: torch.Tensor


@dataclass
class _Sequence:
    """Host side of a sequence: its place in the batch, its tokens, and the rows it holds (at least as many)."""

    place: int
    length: int
    num_held: int


class SequenceTable:
    """Keeps `row_table` and `seq_lens` of the live sequences; every row comes from, and goes back to, the manager.

    Sequences lie at the places 0 to num_live - 1 of the batch; the last one moves to the place of one that finishes.
    Not thread-safe.
    """

    def __init__(self, manager: KVCacheManager, *, max_batch: int, max_seq_len: int) -> None:
        """Makes an empty table.

        Args:
            manager: Where rows come from; `reset` frees all of its rows.
            max_batch: Most live sequences.
            max_seq_len: Most tokens of a sequence.
        """
        self._manager = manager
        self._max_seq_len = max_seq_len
        self._row_table = torch.zeros(max_batch, max_seq_len, dtype=torch.int32, device=manager.device)
        self._seq_lens = torch.zeros(max_batch, dtype=torch.int32, device=manager.device)
        self._sequences: dict[int, _Sequence] = {}
        self._next_id = 0

    @property
    def num_live(self) -> int:
        """Number of live sequences."""
        return len(self._sequences)

    @property
    def sequence_ids(self) -> tuple[int, ...]:
        """Ids of the live sequences in the order of the batch."""
        return tuple(sorted(self._sequences, key=lambda sequence_id: self._sequences[sequence_id].place))

    def rows(self, sequence_id: int) -> torch.Tensor:
        """Rows of a sequence's tokens: a view, int32, [length].

        Raises:
            RapidLLMError: No live sequence has that id.
        """
        sequence = self._get(sequence_id)
        return self._row_table[sequence.place, : sequence.length]

    def add(self, num_tokens: int, *, in_blocks: bool = False) -> int:
        """Starts a sequence and takes the rows of its prompt.

        Args:
            num_tokens: Length of the prompt.
            in_blocks: Take whole aligned blocks; later tokens fill the last one before new rows are taken.

        Returns:
            Id of the sequence.

        Raises:
            OutOfRowsError: The cache has too few rows; nothing has changed.
            RapidLLMError: The batch is full, or the prompt is empty or longer than max_seq_len.
        """
        if not 0 < num_tokens <= self._max_seq_len:
            raise RapidLLMError(
                f"SequenceTable expected a prompt of 1 to {self._max_seq_len} tokens, got {num_tokens}; cut it or make the table wider."
            )
        place = self._next_place()
        if in_blocks:
            num_blocks = -(-num_tokens // self._manager.block_size)
            blocks = self._manager.alloc_blocks(num_blocks)
            if blocks is None:
                raise self._out_of_rows(num_blocks * self._manager.block_size)
            rows = blocks.view(-1)
            if rows.numel() > self._max_seq_len:
                self._manager.release(rows[self._max_seq_len :])
                rows = rows[: self._max_seq_len]
        else:
            rows = self._allocate(num_tokens)
        return self._start(place, rows, num_tokens)

    def fork(self, sequence_id: int) -> int:
        """Starts a sequence that shares the rows of another's tokens so far; each then goes its own way.

        Returns:
            Id of the new sequence.

        Raises:
            RapidLLMError: No live sequence has that id, or the batch is full.
        """
        rows = self.rows(sequence_id)
        place = self._next_place()
        self._manager.add_ref(rows)
        return self._start(place, rows, rows.numel())

    def append(self) -> DecodeStep:
        """Adds a token to every live sequence.

        Returns:
            The step; its tensors are views of the table and hold until the next change of it.

        Raises:
            OutOfRowsError: The cache has too few rows; nothing has changed.
            RapidLLMError: No sequence is live, or one has max_seq_len tokens already.
        """
        sequences = sorted(self._sequences.values(), key=lambda sequence: sequence.place)
        if not sequences:
            raise RapidLLMError("append expected a live sequence, got none; add one first.")
        if max(sequence.length for sequence in sequences) >= self._max_seq_len:
            raise RapidLLMError(
                f"append expected sequences shorter than max_seq_len {self._max_seq_len}, got one of that length; "
                "finish it or make the table wider."
            )
        lacking = [sequence for sequence in sequences if sequence.length == sequence.num_held]
        rows = self._allocate(len(lacking))
        batch = len(sequences)
        table, seq_lens = self._row_table[:batch], self._seq_lens[:batch]
        if len(lacking) == batch:
            # The usual case writes at the lengths on the device and copies nothing from the host.
            table.scatter_(1, seq_lens[:, None].long(), rows[:, None])
        elif lacking:
            places = torch.tensor([sequence.place for sequence in lacking], device=table.device)
            table[places, seq_lens[places].long()] = rows
        for sequence in sequences:
            sequence.num_held += sequence.length == sequence.num_held
            sequence.length += 1
        slots = table.gather(1, seq_lens[:, None].long()).view(-1)
        seq_lens += 1
        return DecodeStep(slots, table, seq_lens)

    def prefill_step(self, sequence_id: int) -> PrefillStep:
        """The step that writes a sequence's tokens.

        Raises:
            RapidLLMError: No live sequence has that id.
        """
        return PrefillStep(self.rows(sequence_id))

    def finish(self, sequence_id: int, *, keep_cached: bool = False) -> None:
        """Ends a sequence and gives its references back.

        Args:
            sequence_id: Which.
            keep_cached: Leave the rows' contents in the cache until they are evicted.

        Raises:
            RapidLLMError: No live sequence has that id.
        """
        sequence = self._get(sequence_id)
        self._manager.release(self._row_table[sequence.place, : sequence.num_held], keep_cached=keep_cached)
        last = max(self._sequences.values(), key=lambda other: other.place)
        self._row_table[sequence.place] = self._row_table[last.place]
        self._seq_lens[sequence.place] = self._seq_lens[last.place]
        self._seq_lens[last.place] = 0
        last.place = sequence.place
        del self._sequences[sequence_id]

    def reset(self) -> None:
        """Ends every sequence and frees every row of the manager."""
        self._sequences.clear()
        self._seq_lens.zero_()
        self._manager.free_all()

    def _get(self, sequence_id: int) -> _Sequence:
        if sequence_id not in self._sequences:
            live = ", ".join(map(str, self.sequence_ids)) or "none"
            raise RapidLLMError(f"SequenceTable has no live sequence {sequence_id}; live are {live}.")
        return self._sequences[sequence_id]

    def _next_place(self) -> int:
        if self.num_live == self._row_table.shape[0]:
            raise RapidLLMError(
                f"SequenceTable expected a free place in the batch, got {self.num_live} live sequences of as many; "
                "finish one or make max_batch larger."
            )
        return self.num_live

    def _start(self, place: int, rows: torch.Tensor, length: int) -> int:
        self._row_table[place, : rows.numel()] = rows
        self._seq_lens[place] = length
        sequence_id = self._next_id
        self._next_id += 1
        self._sequences[sequence_id] = _Sequence(place, length, rows.numel())
        return sequence_id

    def _allocate(self, num_tokens: int) -> torch.Tensor:
        rows = self._manager.alloc_kvcache_index(num_tokens)
        if rows is None:
            raise self._out_of_rows(num_tokens)
        return rows

    def _out_of_rows(self, needed: int) -> OutOfRowsError:
        free, cached = self._manager.num_free_rows, self._manager.num_cached_rows
        return OutOfRowsError(
            f"SequenceTable needs {needed} cache rows, but {free} are free and {cached} cached; finish a sequence "
            "or make a larger KVCacheManager."
        )
