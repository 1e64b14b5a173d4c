// Makes contexts backed by PyTorch.
#pragma once

#include "tigon/torch/shim.h"

namespace tigon::torch_shim {

std::unique_ptr<Context> make_cpu_context(const Tensor& t);
// Throws in builds without CUDA.
std::unique_ptr<Context> make_cuda_context(const Tensor& t);
bool deterministic();

}  // namespace tigon::torch_shim
