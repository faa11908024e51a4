"""The declared kernels of every backend. Importing this imports neither triton nor flashinfer nor any kernel.

A backend module holds `SPECS`, a tuple of `KernelSpec` rows with lazy targets; it may import
`rapid_llm.kernels.ops.spec`, and nothing else of `rapid_llm.kernels.ops`.
"""

from rapid_llm.kernels.backends import flashinfer, sdpa, torch, triton

__all__ = ["SPECS"]

SPECS = (*torch.SPECS, *triton.SPECS, *sdpa.SPECS, *flashinfer.SPECS)
