"""The table of live sequences: its rows are the manager's, its places are dense, its failures leave no trace."""

import pytest
import torch

from rapid_llm.errors import OutOfRowsError, RapidLLMError
from rapid_llm.kv_cache import KVCacheManager
from rapid_llm.modules import SequenceTable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make(num_rows: int = 32, max_batch: int = 4, max_seq_len: int = 10) -> tuple[KVCacheManager, SequenceTable]:
    manager = KVCacheManager(
        num_rows, num_layers=1, num_kv_heads=1, head_dim=8, dtype=torch.float16, device=DEVICE, block_size=4,
        allocate_kv=False,
    )  # fmt: skip
    return manager, SequenceTable(manager, max_batch=max_batch, max_seq_len=max_seq_len)


def test_prefill_then_decode() -> None:
    _, table = make()
    first, second = table.add(3), table.add(2)
    assert table.prefill_step(first).slot_mapping.tolist() == [0, 1, 2]
    assert table.prefill_step(second).slot_mapping.tolist() == [3, 4]
    step = table.append()
    assert step.slot_mapping.tolist() == [5, 6]
    assert step.seq_lens.tolist() == [4, 3]
    assert step.row_table[:, :4].tolist() == [[0, 1, 2, 5], [3, 4, 6, 0]]
    assert table.rows(second).tolist() == [3, 4, 6]
    assert step.row_table.dtype == step.seq_lens.dtype == torch.int32


def test_blocks_are_filled_before_new_rows_are_taken() -> None:
    """A prompt of 3 in blocks of 4 holds a fourth row; beside it a sequence of single rows takes one a token."""
    manager, table = make()
    in_blocks, single = table.add(3, in_blocks=True), table.add(1)
    assert manager.num_free_rows == 32 - 5
    assert table.append().slot_mapping.tolist() == [3, 5]
    assert manager.num_free_rows == 32 - 6
    assert table.append().slot_mapping.tolist() == [6, 7]
    assert table.rows(in_blocks).tolist() == [0, 1, 2, 3, 6]
    table.finish(in_blocks)
    table.finish(single)
    assert manager.num_free_rows == 32


def test_finishing_gives_back_rows_that_no_token_has_filled() -> None:
    manager, table = make()
    table.finish(table.add(3, in_blocks=True))
    assert manager.num_free_rows == 32


def test_blocks_wider_than_the_table_keep_what_fits() -> None:
    manager, table = make(max_seq_len=6)
    table.add(5, in_blocks=True)
    assert manager.num_free_rows == 32 - 6
    assert table.append().slot_mapping.tolist() == [5]


def test_a_fork_shares_rows_and_goes_its_own_way() -> None:
    manager, table = make()
    parent = table.add(3, in_blocks=True)
    child = table.fork(parent)
    assert manager.ref_counts()[:4].tolist() == [2, 2, 2, 1]
    step = table.append()
    assert step.slot_mapping.tolist() == [3, 4]
    assert table.rows(child).tolist() == [0, 1, 2, 4]
    table.finish(parent)
    assert manager.ref_counts()[:5].tolist() == [1, 1, 1, 0, 1]
    assert table.append().row_table[0, :5].tolist() == [0, 1, 2, 4, 3]
    table.finish(child)
    assert manager.num_free_rows == 32


def test_the_last_sequence_takes_the_place_of_one_that_finishes() -> None:
    _, table = make()
    first, second, third = table.add(1), table.add(2), table.add(3)
    rows = table.rows(third).tolist()
    table.finish(first)
    assert table.sequence_ids == (third, second)
    assert table.rows(third).tolist() == rows
    step = table.append()
    assert step.seq_lens.tolist() == [4, 3]
    assert step.slot_mapping.shape == (2,)
    with pytest.raises(RapidLLMError, match="no live sequence 0; live are 2, 1"):
        table.finish(first)


def test_cached_rows_are_evicted_under_pressure() -> None:
    manager, table = make(num_rows=8)
    table.finish(table.add(6), keep_cached=True)
    assert (manager.num_free_rows, manager.num_cached_rows) == (2, 6)
    table.add(4)
    assert (manager.num_free_rows, manager.num_cached_rows) == (0, 4)


@pytest.mark.parametrize("in_blocks", [True, False])
def test_out_of_rows_is_one_error_and_leaves_no_trace(in_blocks: bool) -> None:
    manager, table = make(num_rows=8)
    table.add(7)
    needed = 4 if in_blocks else 2
    with pytest.raises(OutOfRowsError, match=f"needs {needed} cache rows, but 1 are free and 0 cached; finish"):
        table.add(2, in_blocks=in_blocks)
    assert (table.num_live, manager.num_free_rows) == (1, 1)
    table.add(1)
    with pytest.raises(OutOfRowsError, match="needs 2 cache rows, but 0 are free"):
        table.append()
    assert [table.rows(sequence_id).numel() for sequence_id in table.sequence_ids] == [7, 1]


def test_limits_of_the_table() -> None:
    _, table = make(max_batch=1, max_seq_len=3)
    with pytest.raises(RapidLLMError, match="expected a live sequence, got none"):
        table.append()
    for length in (0, 4):
        with pytest.raises(RapidLLMError, match=f"a prompt of 1 to 3 tokens, got {length}"):
            table.add(length)
    only = table.add(3)
    with pytest.raises(RapidLLMError, match="1 live sequences of as many"):
        table.fork(only)
    with pytest.raises(RapidLLMError, match="shorter than max_seq_len 3"):
        table.append()


def test_reset_frees_everything_and_restores_the_bump_path() -> None:
    manager, table = make()
    table.finish(table.add(2))
    table.add(5)
    table.reset()
    assert (table.num_live, manager.num_free_rows) == (0, 32)
    table.add(2)
    assert manager.last_alloc_path == "bump"
    assert table.append().seq_lens.tolist() == [3]
