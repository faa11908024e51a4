"""The evidence for the verdict's error rates: `python -m tests.statistics NAME`, with NAME `replay`, `simulate`, `bias` or `resample`.

Numpy and scipy only, seeds fixed, no torch. docs/statistics.md has what the commands printed.
"""
