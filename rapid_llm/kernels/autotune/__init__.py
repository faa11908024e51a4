"""Tuned configs: the search for the fastest, and the store that keeps them. Timers are handed in: nothing here reads a clock."""

from rapid_llm.kernels.autotune.config_store import ConfigKey, ConfigStore, StoredConfig, get_best_config
from rapid_llm.kernels.autotune.searcher import AutotuneSearcher, SearchResult, Trial, TuningProblem

__all__ = [
    "AutotuneSearcher",
    "ConfigKey",
    "ConfigStore",
    "SearchResult",
    "StoredConfig",
    "Trial",
    "TuningProblem",
    "get_best_config",
]
