"""Write a source file as C++ that the emulator's headers compile: python translate.py FROM TO."""

import re
import sys
from pathlib import Path

source, target = map(Path, sys.argv[1:])
text = source.read_text()
# Dynamic shared memory is one array of the CTA.
text = re.sub(
    r"extern __shared__(?: __align__\(\d+\))? ([\w ]+) (\w+)\[\];",
    r"\1* const \2 = reinterpret_cast<\1*>(emulator::dynamic_shared);",
    text,
)
text = re.sub(r"__shared__ (alignas\([^)]*\))", r"\1 __shared__", text)
if source.name == "context_cpu.cpp" and source.parent.name == "torch":
    text = text.replace("return Device::cpu;", "return Device::cuda;")  # CPU tensors take the kernels
if source.name == "grouped_gemm.cpp":  # of what the kernels do not take, PyTorch's matmul on a GPU
    text = text.replace(
        "{ TIGON_RUN(",
        """{
  bool fits = g.a.dtype != DType::f32;
  for (const Matrix* m : {&g.a, &g.b, &g.c})
    fits = fits && reinterpret_cast<uintptr_t>(m->data) % 16 == 0 && m->stride % 8 == 0 && m->cols % 8 == 0;
  if (!fits) return cpu::grouped_gemm(ctx, g);
  TIGON_RUN(""",
    )
if source.name == "fp8_linear.cpp":  # cuBLASLt's
    text = text.replace("TIGON_RUN(kOp, ctx, fp8_gemm, p)", "cpu::fp8_gemm(ctx, p)")
if source.name == "launch.cuh":
    text = text.replace("return reinterpret_cast<const void*>(kernel);", "return emulator::entry_of(kernel);")
if not target.exists() or target.read_text() != text:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
