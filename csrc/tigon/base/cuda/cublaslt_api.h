// Declares the cuBLASLt entry points used here by hand: the library is opened at run time, and machines that
// build Tigon need not have its headers. tests/cpp/cublaslt_api_check.cpp compares these declarations with
// the real header if that is installed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tigon::cuda::lt {

using Handle = struct HandleOpaque*;
using MatmulDesc = struct MatmulDescOpaque*;
using Layout = struct LayoutOpaque*;
using Preference = struct PreferenceOpaque*;
using Status = int;  // cublasStatus_t; 0 is success

struct Algo {
  uint64_t data[8];
};
struct HeuristicResult {
  Algo algo;
  size_t workspace_size;
  Status state;
  float waves;
  int reserved[4];
};

enum : int { kR32F = 0, kR16F = 2, kR16BF = 14, kR8FE4M3 = 28 };  // cudaDataType_t
enum : int { kCompute32F = 68 };                                  // cublasComputeType_t
enum : int { kOpN = 0, kOpT = 1 };                                // cublasOperation_t
// These are values of cublasLtMatmulDescAttributes_t.
enum : int {
  kDescTransA = 3,
  kDescTransB = 4,
  kDescScalesA = 17,
  kDescScalesB = 18,
  kDescFastSums = 25,
  kDescScaleModeA = 31,
  kDescScaleModeB = 32
};
enum : int { kScaleOuterVector = 3 };  // cublasLtMatmulMatrixScale_t, of CUDA 12.9
// These are values of cublasLtMatmulAlgoConfigAttributes_t.
enum : int {
  kAlgoId = 0,
  kAlgoTile = 1,
  kAlgoSplitK = 2,
  kAlgoReduction = 3,
  kAlgoStages = 6,
  kAlgoCluster = 8
};
enum : int { kTile128x160 = 29, kTile168x128 = 197, kTile176x128 = 201 };  // cublasLtMatmulTile_t
enum : uint32_t { kReduceNone = 0, kReduceInComputeType = 2 };             // cublasLtReductionScheme_t
enum : int {
  kPrefMaxWorkspace = 1,
  kPrefReductions = 3,
  kPrefAlignA = 5,
  kPrefAlignB = 6,
  kPrefAlignC = 7,
  kPrefAlignD = 8
};

struct Api {
  Status (*create)(Handle*);
  Status (*matmul_desc_create)(MatmulDesc*, int compute, int scale_type);
  Status (*matmul_desc_set)(MatmulDesc, int attribute, const void*, size_t);
  Status (*matmul_desc_destroy)(MatmulDesc);
  Status (*layout_create)(Layout*, int type, uint64_t rows, uint64_t cols, int64_t ld);
  Status (*layout_destroy)(Layout);
  Status (*preference_create)(Preference*);
  Status (*preference_set)(Preference, int attribute, const void*, size_t);
  Status (*preference_destroy)(Preference);
  Status (*heuristic)(Handle, MatmulDesc, Layout, Layout, Layout, Layout, Preference, int, HeuristicResult*,
                      int*);
  Status (*algo_check)(Handle, MatmulDesc, Layout, Layout, Layout, Layout, const Algo*, HeuristicResult*);
  Status (*algo_get)(const Algo*, int attribute, void*, size_t, size_t* written);
  Status (*matmul)(Handle, MatmulDesc, const void* alpha, const void* a, Layout, const void* b, Layout,
                   const void* beta, const void* c, Layout, void* d, Layout, const Algo*, void* workspace,
                   size_t, void* stream);
};

// Opens the library on first use. Throws tigon::Error naming what was looked for if it is missing.
const Api& api();

}  // namespace tigon::cuda::lt
