"""Faults of when a kernel works: at the first call, at every other, not while it is timed, or on another stream than the caller's."""

from __future__ import annotations

from dataclasses import dataclass

from asv_bench.mutation.fault import DECODE, DECODE_E4M3, DECODE_WRITE, EVERYWHERE, GPU_ONLY, PREFILL, Edit, Fault


@dataclass(frozen=True)
class _Launcher:
    """A launcher, and what its faults do to its output.

    Attributes:
        path, name: Where it is defined.
        key: Expression that tells one working set from another.
        spoil, keep, restore: Statement that makes the output wrong; expression that copies it; statement that writes the copy `kept`.
    """

    path: str
    name: str
    key: str
    spoil: str
    keep: str
    restore: str

    def edit(self, body: str) -> Edit:
        """Puts a launcher with this body in place of the right one, `_right`."""
        lines = body.format(key=self.key, spoil=self.spoil, keep=self.keep, restore=self.restore).replace("\n", "\n    ")
        text = (
            f"_right = {self.name}\n_calls = 0\n_seen = {{}}\n_streams = []\n\n\n"
            f"def {self.name}(*args, **kwargs):\n    global _calls\n    _calls += 1\n    {lines}\n"
        )
        return Edit(self.path, "", text)


_DECODE = _Launcher(
    "rapid_llm/kernels/paged_decode.py",
    "paged_decode",
    key="args[5].data_ptr()",
    spoil="args[5].zero_()",
    keep="args[5].clone()",
    restore="args[5].copy_(kept)",
)
_WRITE = _Launcher(
    "rapid_llm/kernels/kv_write.py",
    "kv_write",
    key="args[2].data_ptr()",
    spoil="args[3][args[2].long()] = 0",
    keep="torch.stack([args[3][args[2].long()], args[4][args[2].long()]])",
    restore="args[3][args[2].long()], args[4][args[2].long()] = kept[0], kept[1]",
)


_EMPTY = "the timed region launches nothing"
"""What a graph says that was captured of nothing."""


def _both(
    name: str, what: str, body: str, *, decodes: tuple[str, ...] = ("one split", "long"), devices: tuple[str, ...] = EVERYWHERE
) -> tuple[Fault, Fault]:
    """The fault in both launchers; decode also for a call as long as the gate's ("long"), which only a GPU has."""
    return (
        Fault(
            f"{name} (decode)",
            what,
            {DECODE: decodes, DECODE_E4M3: ("one split",)},
            (_DECODE.edit(body),),
            status=("unverified", "invalid"),
            reason=f"elements are off|{_EMPTY}",
            devices=devices,
        ),
        Fault(
            f"{name} (write)",
            what,
            {PREFILL: ("fp16",), DECODE_WRITE: ("fp16",)},
            (_WRITE.edit(body),),
            status=("unverified", "invalid"),
            reason=f"KV write, . half|{_EMPTY}",
            devices=devices,
        ),
    )


FAULTS = (
    *_both("stale-output", "Nothing is written.", "return"),
    *_both("11th-call", "Only the 11th call is wrong.", "_right(*args, **kwargs)\nif _calls == 11:\n    {spoil}"),
    *_both("every-other-call", "Every second call is wrong.", "_right(*args, **kwargs)\nif _calls % 2 == 0:\n    {spoil}"),
    *_both("after-13-calls", "From the 14th call on nothing is written.", "if _calls <= 13:\n    _right(*args, **kwargs)"),
    *_both(
        "first-call-only",
        "Only the first call for a working set writes: later ones find the result in place, and launch nothing.",
        "if {key} not in _seen:\n    _seen[{key}] = True\n    _right(*args, **kwargs)",
    ),
    *_both(
        "kept-result",
        "The first result for a working set is kept, and copied at every later call.",
        "kept = _seen.get({key})\nif kept is None:\n    _right(*args, **kwargs)\n    _seen[{key}] = {keep}\nelse:\n    {restore}",
    ),
    *_both(
        "nothing-while-captured",
        "Nothing is launched while a CUDA graph is captured: the timed replays are empty.",
        "if not torch.cuda.is_current_stream_capturing():\n    _right(*args, **kwargs)",
        devices=GPU_ONLY,
    ),
    *_both(
        "side-stream",
        "The kernel runs on a stream that the caller's neither waits for nor is waited for by.",
        "if not _streams:\n    _streams.append(torch.cuda.Stream())\nwith torch.cuda.stream(_streams[0]):\n    _right(*args, **kwargs)",
        devices=GPU_ONLY,
    ),
)
