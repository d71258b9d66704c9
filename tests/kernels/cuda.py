"""The kernels' Metal sources as CUDA: a check of them by another compiler, and on another GPU.

`mx.fast.cuda_kernel` takes what `mx.fast.metal_kernel` takes, and the grid in threads, too. A few
names differ; these are given here, and no line of arithmetic is written twice.

`python -m tests.kernels.cuda` prints the registers that nvcc gives a thread, for all variants and
all numbers of rows of one launch, in some minutes: a hint only of what Apple's compiler does.
"""

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import mlx.core as mx
import pytest
import typer

from mlx_redrafter.kernels.small_t import source_of
from mlx_redrafter.kernels.tree_attention import AttentionVariant, attention_source
from mlx_redrafter.kernels.variant import METAL_TYPES, AnyVariant
from tests.golden.record_metal import ATTENTION_VARIANTS, DENSE_VARIANTS, VARIANTS
from tests.kernels.emulator import kinds

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc, found none")
needs_nvidia = pytest.mark.skipif(
    not mx.cuda.is_available(), reason="needs an NVIDIA GPU, and MLX's CUDA back end"
)

# Metal's names; MLX includes the types of 16-bit numbers itself.
HEADER = """
typedef __half float16_t;
typedef __nv_bfloat16 bfloat16_t;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
template <typename A>
__device__ inline A as_type(uint v) {
  return __uint_as_float(v);
}
template <typename A>
__device__ inline A as_type(ushort v) {
  return __ushort_as_half(v);
}
enum class mem_flags { mem_threadgroup };
__device__ inline void threadgroup_barrier(mem_flags) { __syncthreads(); }
__device__ inline float simd_shuffle_down(float v, int by) {
  return __shfl_down_sync(0xffffffffu, v, by);
}
__device__ inline float simd_sum(float v) {
  for (int by = 16; by > 0; by /= 2) v += __shfl_xor_sync(0xffffffffu, v, by);
  return v;
}
__device__ inline float simd_max(float v) {
  for (int by = 16; by > 0; by /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, by));
  return v;
}
namespace fast {
__device__ inline float exp(float x) { return __expf(x); }
}  // namespace fast
"""
# A sum of two products. The compiler may fuse either one with the addition, and takes one for one
# row and the other for several, so the source says which.
PRODUCTS = re.compile(r"= ([\w\[\]]+) \* ([\w\[\]]+) \+ ([\w\[\]]+) \* ([\w\[\]]+)")
# What Metal says of a thread's place.
PLACE = """
const int place = threadIdx.y * blockDim.x + threadIdx.x;
const int thread_index_in_simdgroup = place % 32;
const int simdgroup_index_in_threadgroup = place / 32;
const dim3 threadgroup_position_in_grid = blockIdx;
const dim3 thread_position_in_grid(
    blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y, 0);
"""
# A number that is an argument is a reference in Metal, a pointer in CUDA.
SCALE, SCALE_ARGUMENT = "const float scale = *scale_given;\n", "scale_given"
# What MLX generates around a source, as far as a compiler needs it.
BEFORE = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>
template <typename A>
struct Eight {
  A values[8];
  __device__ A operator[](int i) const { return values[i]; }
};
typedef Eight<int32_t> Shape;
typedef Eight<int64_t> Strides;
"""
# Registers of a thread on Apple's GPUs, as philipturner/metal-benchmarks has found.
MOST_REGISTERS = 128
# A variant and rows, or a variant of attention.
Compiled = tuple[AnyVariant, int] | AttentionVariant


class Usage(NamedTuple):
    """Registers of 32 bits that a thread needs by nvcc, and bytes that found none."""

    registers: int
    spilled: int


def cuda_source(body: str) -> str:
    """A kernel's body as `mx.fast.cuda_kernel` takes it, with `HEADER`."""
    body = re.sub(r"\b(device|thread)\b", "", body)
    # MLX's own `Limits` for CUDA has functions instead of constants.
    body = body.replace("Limits<float>::finite_min", "-3.402823466e+38f")
    body = PRODUCTS.sub(r"= __fmaf_rn(\1, \2, __fmul_rn(\3, \4))", body)
    return PLACE + re.sub(r"\bthreadgroup\b", "__shared__", body)


def cuda_kernel(name: str, source: str, input_names: list[str], **given: Any) -> Any:
    """`mx.fast.metal_kernel` for NVIDIA's GPUs."""
    if "scale" in input_names:
        source = SCALE + source
        input_names = [SCALE_ARGUMENT if one == "scale" else one for one in input_names]
    text = cuda_source(source)
    return mx.fast.cuda_kernel(
        name=name, source=text, header=HEADER, input_names=input_names, **given
    )


def usage(variants: Sequence[Compiled], folder: Path) -> list[Usage]:
    """Compile kernels together by nvcc; return their needs on Hopper, without a limit."""
    said = _compile(variants, folder, "-cubin", "-Xptxas", "-v")
    return [_reported(said, f"kernel_{i}") for i in range(len(variants))]


def fused_by_choice(variants: Sequence[Compiled], folder: Path) -> list[str]:
    """Sums of two products in which the compiler has chosen the one that it fuses."""
    _compile(variants, folder, "-ptx")
    text = (folder / "out").read_text(encoding="utf-8")
    return [
        line
        for kernel in text.split(".entry")[1:]
        for product in re.findall(r"mul\.f32\s+(%f\d+),", kernel)
        for line in re.findall(rf"fma\.rn\.f32[^;]*, {product};", kernel)
    ]


def _compile(variants: Sequence[Compiled], folder: Path, *options: str) -> str:
    """Compile kernels together into the file "out", and return what nvcc says."""
    file = folder / "kernels.cu"
    texts = [_function(f"kernel_{i}", one) for i, one in enumerate(variants)]
    file.write_text(BEFORE + HEADER + "".join(texts), encoding="utf-8")
    command = ["nvcc", "-arch=sm_90", *options, "-o", str(folder / "out"), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stderr


def _function(name: str, variant: Compiled) -> str:
    if isinstance(variant, AttentionVariant):
        number, body = METAL_TYPES[variant.dtype], SCALE + attention_source(variant)
        inputs = {"queries": number, "keys": number, "values": number, "parents": "int"}
        more = f"const float* {SCALE_ARGUMENT}, "
    else:
        product, rows = variant
        number, (body, matrix, *_) = METAL_TYPES[product.dtype], source_of(product, rows)
        types = {one: METAL_TYPES.get(kind, f"{kind}_t") for one, kind in kinds(product).items()}
        inputs = {"x": number} | {one: types[one] for one in matrix}
        more = ""
    parameters = "".join(
        f"const {type_}* {one}, const Shape {one}_shape, const Strides {one}_strides, "
        for one, type_ in inputs.items()
    )
    return (
        f'extern "C" __global__ void {name}({parameters}{more}{number}* y) {{'
        f"{cuda_source(body)}}}\n"
    )


def _reported(output: str, name: str) -> Usage:
    """What ptxas says of a kernel."""
    found = re.search(
        rf"'{name}' for .*?(\d+) bytes spill stores.*?Used (\d+) registers", output, re.DOTALL
    )
    if not found:
        raise RuntimeError(f"nvcc says nothing of {name}: {output}")
    return Usage(registers=int(found[2]), spilled=int(found[1]))


def main() -> None:
    """Compile and print a line per variant."""
    from tests.kernels.test_small_t import LAUNCHED

    found: list[Usage] = []
    with TemporaryDirectory() as folder:
        for variant in (*VARIANTS, *DENSE_VARIANTS):
            of_rows = usage([(variant, rows) for rows in LAUNCHED], Path(folder))
            typer.echo(f"{variant}, from {LAUNCHED[0]} rows on: {', '.join(map(_text, of_rows))}")
            found += of_rows
        heads = usage(ATTENTION_VARIANTS, Path(folder))
    found += heads
    for one, head in zip(ATTENTION_VARIANTS, heads, strict=True):
        typer.echo(f"attention {one}: {_text(head)}")
    most, spilled = max(one.registers for one in found), sum(one.spilled > 0 for one in found)
    typer.echo(f"{len(found)} kernels: at most {most} registers, {spilled} with spills")


def _text(used: Usage) -> str:
    return f"{used.registers}" + (f" and {used.spilled} bytes spilled" if used.spilled else "")


if __name__ == "__main__":
    typer.run(main)
