"""LLM-serving kernels in Triton, and a dispatch that prefers them on measured, verified numbers.

Importing this package imports neither torch nor triton: `rapid_llm.kernels.ops` holds the public calls,
`rapid_llm.kv_cache` the cache manager, `rapid_llm.modules` the layers.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
