// What tigon/base/cuda/matmul/ptx.cuh does, on a CPU. What is asynchronous happens as late as it may:
// products and stores when they are waited for.
#pragma once

#include <cuda.h>

#include "tigon/base/cuda/ptx.cuh"

namespace tigon::cuda::matmul {

inline void prefetch_tensormap(const CUtensorMap*) {}

// The place of a byte in rows of 128 bytes that are swizzled in groups of eight, which are aligned to 1024
// bytes.
inline char* swizzled(char* p) {
  const uint32_t at = uint32_t(p - emulator::dynamic_shared);
  return emulator::dynamic_shared + (at ^ (at >> 7 & 7) << 4);
}
template <class Fn>
void each_of_box(const CUtensorMap& map, int x, int3 y, Fn fn) {
  if (x < 0 || y.x < 0 || y.y < 0 || y.z < 0)
    fprintf(stderr, "emulator: a box begins before its tensor\n"), abort();
  // Addresses are modulo 2^64.
  const uint64_t begin = y.y * uint64_t(map.stride[1]) + y.z * uint64_t(map.stride[2]);
  for (int i = 0; i < map.box[1]; ++i)
    for (int j = 0; j < map.box[0]; ++j) {
      const bool inside =
          x + j < map.size[0] && y.x + i < map.size[1] && y.y < map.size[2] && y.z < map.size[3];
      const uint64_t at = begin + (y.x + i) * uint64_t(map.stride[0]) + uint64_t(x + j);
      fn((i * map.box[0] + j) * 2,
         inside ? reinterpret_cast<uint16_t*>(uint64_t(map.data) + 2 * at) : nullptr);
    }
}
inline int3 widen(int2 y) { return {y.x, y.y, 0}; }
inline int3 widen(int3 y) { return y; }
template <bool kMulticast, class Coordinates>
void cp_async_bulk_tensor_load(uint32_t to, const CUtensorMap* map, int x, Coordinates y, uint64_t* barrier,
                               uint16_t mask) {
  char* const place = emulator::at_shared(to);
  if ((place - emulator::dynamic_shared) % 1024) fprintf(stderr, "emulator: a box is not aligned\n"), abort();
  for (unsigned rank = 0; rank < cluster_size(); ++rank)
    if (kMulticast ? mask >> rank & 1 : rank == cluster_rank()) {
      each_of_box(*map, x, widen(y), [&](int at, const uint16_t* from) {
        const uint16_t value = from ? *from : 0;
        memcpy(emulator::of_rank(swizzled(place + at), rank), &value, 2);
      });
      emulator::mbarrier_update(reinterpret_cast<uint64_t*>(emulator::of_rank(barrier, rank)), 0,
                                -map->box[0] * map->box[1] * 2);
    }
}
template <class Coordinates>
void cp_async_bulk_tensor_store(const CUtensorMap* map, uint32_t from, int x, Coordinates y) {
  emulator::cta.thread->bulk.add([=] {
    each_of_box(*map, x, widen(y), [&](int at, uint16_t* to) {
      if (to) memcpy(to, swizzled(emulator::at_shared(from) + at), 2);
    });
  });
}
inline void cp_async_bulk_store(void* to, uint32_t from, int bytes) {
  aligned(to, 16), aligned(emulator::at_shared(from), 16);
  emulator::cta.thread->bulk.add([=] { memcpy(to, emulator::at_shared(from), size_t(bytes)); });
}
inline void cp_async_bulk_commit_group() { emulator::cta.thread->bulk.commit(); }
template <int Pending>
void cp_async_bulk_wait_group_read() {
  emulator::cta.thread->bulk.wait(Pending);
}

inline void mbarrier_arrive_cluster(uint64_t* barrier, unsigned rank) {
  emulator::mbarrier_update(reinterpret_cast<uint64_t*>(emulator::of_rank(barrier, rank)), 1, 0);
}
inline void cp_async_mbarrier_arrive_noinc(uint64_t* barrier) {
  emulator::commit_copies();
  emulator::wait_copies(0);
  emulator::mbarrier_update(barrier, 1, 0);
}
inline void bar_arrive(int id, int threads) { emulator::named_barrier(id, threads, false); }
inline void bar_sync(int id, int threads) { emulator::named_barrier(id, threads); }

template <bool kTrans = false>
void stmatrix_x4(uint32_t to, const uint32_t (&w)[4]) {
  const int lane = emulated_lane();
  const uint64_t* all = emulator::exchange(~0u, to);
  for (int i = 0; i < 4; ++i)
    for (int k = 0; k < 2; ++k) {
      const int row = lane / 4, column = lane % 4 * 2 + k;
      const uint16_t value = uint16_t(w[i] >> 16 * k);
      memcpy(
          emulator::at_shared(uint32_t(all[8 * i + (kTrans ? column : row)])) + 2 * (kTrans ? row : column),
          &value, 2);
    }
  emulator::exchange(~0u, 0);
}

inline void wgmma_fence() {}
inline void wgmma_commit_group() { emulator::cta.thread->wgmma.commit(); }
template <int Pending>
void wgmma_wait_group() {
  emulator::cta.thread->wgmma.wait(Pending);
  emulator::exchange(~0u, 0);  // the whole warp has read its operands
}
template <int kSize>
void wgmma_wait(float (&)[kSize]) {
  wgmma_wait_group<0>();
}
// Element (mn, k) of the operand of a matrix descriptor.
inline float described(uint64_t descriptor, bool trans, int mn, int k, float (*widen)(uint16_t)) {
  const uint32_t start = uint32_t(descriptor & 0x3fff) << 4,
                 leading = uint32_t(descriptor >> 16 & 0x3fff) << 4,
                 stride = uint32_t(descriptor >> 32 & 0x3fff) << 4;
  const uint32_t at = trans ? mn / 64 * leading + k / 8 * stride + k % 8 * 128 + mn % 64 * 2
                            : mn / 8 * stride + mn % 8 * 128 + k * 2;
  const uint32_t first = (start - emulator::shared_address(emulator::dynamic_shared)) & 0x3ffff;
  uint16_t bits;
  memcpy(&bits, swizzled(emulator::dynamic_shared + first + at), 2);
  return widen(bits);
}
template <class T, bool kTransA, bool kTransB>
void wgmma_m64n256k16(float (&d)[128], uint64_t a, uint64_t b, bool accumulate) {
  constexpr auto widen = std::is_same_v<T, __half> ? widen_f16 : widen_bf16;
  emulator::cta.thread->wgmma.add([&d, a, b, accumulate] {
    const int warp = int(threadIdx.x) / 32 % 4, t = emulated_lane() / 4, q = emulated_lane() % 4;
    for (int h = 0; h < 2; ++h) {
      float row[16];
      for (int k = 0; k < 16; ++k) row[k] = described(a, kTransA, 16 * warp + 8 * h + t, k, widen);
      for (int j = 0; j < 32; ++j)
        for (int i = 0; i < 2; ++i) {
          float& sum = d[4 * j + 2 * h + i];
          double s = accumulate ? sum : 0;
          for (int k = 0; k < 16; ++k)
            s += double(row[k]) * described(b, kTransB, 8 * j + 2 * q + i, k, widen);
          sum = float(s);
        }
    }
  });
}

}  // namespace tigon::cuda::matmul
