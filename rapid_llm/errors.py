"""Every exception this package raises on purpose: one class a mistake, with the mend in its message."""

__all__ = [
    "BackendError",
    "DTypeError",
    "EvidenceError",
    "NoKernelError",
    "OutOfRowsError",
    "PerfProviderError",
    "RapidLLMError",
    "RegistryError",
    "ScaleError",
    "ShapeError",
    "TuningError",
    "WorkspaceError",
]


class RapidLLMError(Exception):
    """Base of all of them."""


class ShapeError(RapidLLMError, ValueError):
    """A tensor's shape, stride, dtype or device disagrees with the call's contract."""


class DTypeError(ShapeError, TypeError):
    """A tensor's dtype disagrees; a `ShapeError`, so that one clause catches every disagreement of a tensor."""


class ScaleError(RapidLLMError, ValueError):
    """A quantisation or softmax scale is no finite positive fp32 number, or is given where none applies."""


class BackendError(RapidLLMError, ValueError):
    """A backend is named, by argument or environment variable, that no registered spec has."""


class NoKernelError(RapidLLMError, RuntimeError):
    """No registered spec can serve the request; the message lists each spec and its reasons."""


class PerfProviderError(RapidLLMError, RuntimeError):
    """The perf provider raised, or returned something other than a positive finite number of milliseconds or None."""


class EvidenceError(RapidLLMError, ValueError):
    """A file of measurements cannot be used, or is of another device; nothing of it was installed."""


class RegistryError(RapidLLMError, ValueError):
    """A spec is unknown, registered twice, declared wrongly, or its target cannot be loaded."""


class OutOfRowsError(RapidLLMError, RuntimeError):
    """The KV cache has too few rows for a step; nothing of the step was done."""


class TuningError(RapidLLMError, RuntimeError):
    """No candidate config could be verified and timed, or the injected timer gave no time; nothing was stored."""


class WorkspaceError(RapidLLMError, RuntimeError):
    """A launch's shared memory cannot be had; nothing was launched."""
