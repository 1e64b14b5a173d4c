// Launches that must fail, and setups of a kernel: once for each device.
#include <string>

#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/error.h"
#include "tigon/base/make_context.h"

using namespace tigon;
using namespace tigon::cuda;

namespace {

__global__ void kernel(int* runs) { ++*runs; }

template <class Fn>
std::string error_of(Fn&& fn) {
  try {
    fn();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

int failures = 0;
void check(bool holds, const char* what) {
  if (!holds) printf("launch: not so: %s\n", what);
  failures += !holds;
}
bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

}  // namespace

int main() {
  int runs = 0;
  auto context = make_cuda_context();
  auto run = [&](int64_t blocks, int threads) {
    return error_of([&] { launch("op", *context, kernel, {.blocks = blocks, .threads = threads}, &runs); });
  };
  check(run(3, 1).empty() && runs == 3, "a CTA for each block");
  check(has(run(3, 2048), "kernel launch (3 blocks of 2048 threads) failed"),
        "too many threads are an error");
  check(emulator::last_error == cudaSuccess,
        "a launch that failed leaves no error for the next check of another");
  check(has(run(int64_t{1} << 32 | 1, 1), "at most 2^31 - 1 blocks, got 4294967297"),
        "blocks are not cut to 32 bits");
  check(run(0, 1).empty() && runs == 3, "no blocks are no launch");

  static OncePerDevice once;
  int setups = 0;
  auto prepare = [&](int device, int64_t value = 1) {
    emulator::device = device;
    return error_of([&] { once.run("op", [&] { ++setups; }, value); });
  };
  for (int device : {0, 0, 63, 0, 63}) check(prepare(device).empty(), "a device below the bound");
  check(setups == 2, "a setup for each device");
  check(prepare(0, 7).empty() && prepare(0, 7).empty() && setups == 3, "another for another value");
  check(has(prepare(64), "device index must be below 64, got 64") && setups == 3, "the bound of devices");
  return failures;
}
