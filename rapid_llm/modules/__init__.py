"""Layers built on the kernels: `PagedAttention`, and the table of sequences that it reads."""

from rapid_llm.modules.attention import PagedAttention
from rapid_llm.modules.sequence_table import DecodeStep, PrefillStep, SequenceTable

__all__ = ["DecodeStep", "PagedAttention", "PrefillStep", "SequenceTable"]
