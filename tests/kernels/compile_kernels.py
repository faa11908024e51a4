"""Compiles every kernel for compute capabilities, without a GPU, and prints what the compiler says of it as JSON.

A process of its own, because Triton decides while it is imported whether kernels are compiled or interpreted:
`python compile_kernels.py 80 86`.
"""

import itertools
import json
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rapid_llm.kernels.configs import VARIANTS, choose_config
from rapid_llm.kernels.decode_int8 import paged_decode_int8_kernel, paged_decode_int8_stream_kernel
from rapid_llm.kernels.decode_split import paged_decode_kernel
from rapid_llm.kernels.decode_stream import paged_decode_stream_kernel
from rapid_llm.kernels.kv_quant import quantize_e4m3_kernel
from rapid_llm.kernels.kv_write import kv_write_int8_kernel, kv_write_kernel
from rapid_llm.kernels.rope_write import rope_norm_kv_write_kernel

_POINTERS = {"seq_lens_ptr": "*i32", "table_ptr": "*i32", "slot_ptr": "*i64", "position_ptr": "*i64", "counter_ptr": "*i32"}
_POINTERS |= {"part_out_ptr": "*fp32", "part_lse_ptr": "*fp32", "k_scale_ptr": "*fp32", "v_scale_ptr": "*fp32"}
_FLOATS = {"score_scale", "out_scale", "k_factor", "k_rest", "v_factor", "v_rest", "factor", "rest", "norm_eps"}

_FEW_COLUMNS = {24: 3, 16: 1}
"""Head dims with which several threads of a merge have the same output, with query heads a K/V head; strides are no multiples of 16."""


def _compile(
    kernel: Any, capability: int, constants: dict[str, Any], dtypes: dict[str, str], *, odd: bool = False, **options: int
) -> dict[str, Any]:
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = "*" + dtypes[name] if name in dtypes else _POINTERS[name]
        else:
            signature[name] = "fp32" if name in _FLOATS else "i32"
    # As a launch specialises them: 16-byte aligned pointers, strides that are multiples of 16 unless they are `odd`.
    known = "_ptr" if odd else ("_ptr", "_stride")
    attributes = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names) if name.endswith(known)}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    return {
        "shared_bytes": compiled.metadata.shared,
        "converts": "e4m3x2" in ptx,
        "copies": ptx.count("cp.async.cg.shared.global"),
        "fused_sums": fused_sums(ptx),
    }


def fused_sums(ptx: str) -> int:
    """Multiply-adds whose addend is another thread's value as it came: the own product is exact there and the other's was rounded."""
    others: set[str] = set()
    fused = 0
    for line in ptx.splitlines():
        words = re.findall(r"[%\w.]+", line.split("//")[0])
        if words[:1] == ["shfl.sync.bfly.b32"] or (words[:1] == ["mov.b32"] and words[2:] and words[2] in others):
            others.add(words[1])
        elif words[:1] == ["fma.rn.f32"]:
            fused += words[4] in others
    return fused


def compile_all(capability: int) -> dict[str, dict[str, Any]]:
    """Compiles the kernels as their launchers would ask for them on a device of `capability` (86 for 8.6)."""
    convert = capability >= 89
    report = {}
    decodes = [
        ("fp16", "", 128),
        ("bf16", "", 256),
        ("fp16", "e4m3", 128),
        ("bf16", "e4m3", 96),
        ("fp16", "int8", 128),
        ("bf16", "int8", 256),
    ]
    few = [("fp16", "int8", 24), ("fp16", "", 16)]
    wanted = [
        *itertools.product(VARIANTS[:1], decodes + few),
        *itertools.product(VARIANTS[1:], decodes[::2]),
        *(("stream", f) for f in few),
    ]
    for variant, (q_dtype, kind, head_dim) in wanted:
        odd, group = head_dim in _FEW_COLUMNS, _FEW_COLUMNS.get(head_dim, 4)
        config = choose_config(group, head_dim, one_byte=bool(kind), variant=variant)
        constants = {
            "NUM_KV_HEADS": 8, "GROUP": group, "HEAD_DIM": head_dim, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
            "BLOCK_D": config.block_d, "BLOCK_SIZE": 16 if head_dim == 96 else 1, "BLOCK_H": 4 if group > 1 else 1,
            "BLOCK_S": 4 if config.streamed or odd else 16, "V_OFF": 0 if head_dim == 256 else 8 * head_dim,
            "NARROW": head_dim != 256, "AHEAD": config.tiles_ahead, "SWAP": config.swapped, "DOT_FP32": False, "STAGES": config.num_stages,
        }  # fmt: skip
        if kind != "int8":
            constants |= {"PAIRED": bool(kind), "INT8": False, "CONVERT": convert}
        constants |= {"BLOCK_B": 32} if config.streamed else {"SPLIT": True}
        pool = "i16" if kind else q_dtype
        dtypes = {"q_ptr": q_dtype, "k_ptr": pool, "v_ptr": pool, "out_ptr": q_dtype}
        kernel = paged_decode_stream_kernel if config.streamed else paged_decode_kernel
        if kind == "int8":
            kernel = paged_decode_int8_stream_kernel if config.streamed else paged_decode_int8_kernel
        name = f"{variant}-{q_dtype}-{kind or q_dtype}-{head_dim}"
        options = {} if config.max_registers is None else {"maxnreg": config.max_registers}
        report[name] = _compile(kernel, capability, constants, dtypes, odd=odd, num_warps=config.num_warps, **options)
        tile_bytes = 2 * config.block_n * config.block_d * 2
        if not odd:
            report[name]["tiles"] = report[name]["copies"] * 16 * 32 * config.num_warps / tile_bytes
    for (dtype, pool), (num_elements, together, divide) in itertools.product(
        (("fp16", "fp16"), ("fp16", "u8"), ("bf16", "u8")), ((960, False, False), (1024, True, False), (960, True, True))
    ):
        constants = {
            "NUM_ELEMENTS": num_elements, "HEAD_DIM": num_elements // 8, "TOKENS": 4, "BLOCK": 1024, "TOGETHER": together,
            "E4M3": pool == "u8", "CONVERT": convert, "DIVIDE": divide,
        }  # fmt: skip
        dtypes = {"k_ptr": dtype, "v_ptr": dtype, "k_rows_ptr": pool, "v_rows_ptr": pool}
        name = f"write-{dtype}-{pool}-{num_elements}{'-together' if together else ''}{'-divide' if divide else ''}"
        report[name] = _compile(kv_write_kernel, capability, constants, dtypes)
    for dtype, (num_elements, together, run) in itertools.product(("fp16", "bf16"), ((1024, True, 8), (960, False, 8), (136, True, 1))):
        constants = {
            "NUM_ELEMENTS": num_elements, "HEAD_DIM": num_elements // 8, "TOKENS": 4, "BLOCK": 1024, "TOGETHER": together, "RUN": run,
        }  # fmt: skip
        dtypes = {"k_ptr": dtype, "v_ptr": dtype, "k_rows_ptr": "i8", "v_rows_ptr": "i8"}
        report[f"write-{dtype}-int8-{num_elements}"] = _compile(kv_write_int8_kernel, capability, constants, dtypes)
    for (dtype, pool), head_dim, interleaved in itertools.product((("fp16", "fp16"), ("bf16", "u8")), (96, 256), (False, True)):
        constants = {
            "NUM_Q_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": head_dim, "ROTARY_DIM": 64, "BLOCK_H": 4, "BLOCK_D": 256,
            "INTERLEAVED": interleaved, "Q_NORM": True, "K_NORM": head_dim == 96, "E4M3": pool == "u8", "CONVERT": convert, "DIVIDE": False,
        }  # fmt: skip
        dtypes = {f"{name}_ptr": dtype for name in ("q", "k", "v", "out", "q_weight", "k_weight")}
        dtypes |= {"cos_sin_ptr": "fp32", "k_rows_ptr": pool, "v_rows_ptr": pool}
        name = f"rope-{dtype}-{pool}-{head_dim}{'-interleaved' if interleaved else ''}"
        report[name] = _compile(rope_norm_kv_write_kernel, capability, constants, dtypes, enable_fp_fusion=False)
    constants = {"CONTIGUOUS": False, "BLOCK": 2048, "CONVERT": convert, "DIVIDE": True}
    report["quantize"] = _compile(quantize_e4m3_kernel, capability, constants, {"x_ptr": "fp32", "out_ptr": "u8"})
    return report


if __name__ == "__main__":
    print(json.dumps({capability: compile_all(int(capability)) for capability in sys.argv[1:]}))
