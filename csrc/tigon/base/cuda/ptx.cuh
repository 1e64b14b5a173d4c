// Wraps PTX instructions under PTX's names. Instructions of sm_90 do nothing before sm_90: there a CTA is a
// cluster of its own, and kernels that need more are not launched.
#pragma once

#include <cstdint>
#include <cstring>

namespace tigon::cuda {

// --- arithmetic ----------------------------------------------------------------------------------

__device__ __forceinline__ uint64_t mul_wide_u32(uint32_t a, uint32_t b) {
  uint64_t c;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(c) : "r"(a), "r"(b));
  return c;
}
__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float lg2_approx_ftz(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float rcp_approx_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float rsqrt_approx_ftz(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Returns bytes of a (0 to 3) and b (4 to 7), one for each digit of `bytes`. A digit with 8 added takes the
// byte's sign bit for each of its bits.
__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t bytes) {
  uint32_t c;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(c) : "r"(a), "r"(b), "r"(bytes));
  return c;
}
// Returns the larger one, or NaN if one is NaN. It also takes pairs of 16-bit numbers.
__device__ __forceinline__ float max_NaN(float a, float b) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
  return a;
}
__device__ __forceinline__ uint32_t max_NaN_f16x2(uint32_t a, uint32_t b) {
  asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}
__device__ __forceinline__ uint32_t max_NaN_bf16x2(uint32_t a, uint32_t b) {
  asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}
// Rounds both to float8, with `high` in the upper byte. Magnitudes beyond 448 become 448. Needs sm_89 or
// later.
__device__ __forceinline__ uint32_t cvt_rn_satfinite_e4m3x2_f32(float high, float low) {
  uint16_t both = 0;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
#endif
  return both;
}
// Returns two float8 values as fp32, that of the lower byte first. Needs sm_89 or later.
__device__ __forceinline__ void cvt_rn_f16x2_e4m3x2(uint32_t bytes, float& low, float& high) {
#if __CUDA_ARCH__ >= 890
  asm("{\n.reg .b32 both;\n.reg .b16 one, other;\ncvt.rn.f16x2.e4m3x2 both, %2;\nmov.b32 {one, other}, "
      "both;\n"
      "cvt.f32.f16 %0, one;\ncvt.f32.f16 %1, other;\n}"
      : "=f"(low), "=f"(high)
      : "h"(uint16_t(bytes)));
#endif
}
// Does the same as a pair of f16, and back as the conversion of fp32 does.
__device__ __forceinline__ uint32_t cvt_rn_f16x2_e4m3x2(uint32_t bytes) {
  uint32_t both = 0;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(both) : "h"(uint16_t(bytes)));
#endif
  return both;
}
__device__ __forceinline__ uint32_t cvt_rn_satfinite_e4m3x2_f16x2(uint32_t pair) {
  uint16_t both = 0;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(both) : "r"(pair));
#endif
  return both;
}
// Hides a value's origin from the compiler, which keeps it in a register instead of computing it again.
__device__ __forceinline__ void keep_in_register(uint32_t& x) { asm("" : "+r"(x)); }
__device__ __forceinline__ void keep_in_register(float& x) { asm("" : "+f"(x)); }

// --- global memory -------------------------------------------------------------------------------
// These loads are predicated, without a branch. As asm, a load stays where it is issued: the compiler sinks
// an ordinary one to its first use, and a conditional one below the uses of the loads before it.

// Returns zero if `pred` is false.
__device__ __forceinline__ float ld_global_f32_predicated(bool pred, const float* from) {
  float x;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\nmov.f32 %0, 0f00000000;\n@p ld.global.f32 %0, [%1];\n}"
      : "=f"(x)
      : "l"(from), "r"(unsigned(pred)));
  return x;
}
// Returns 16 bytes, or four words of `fill`.
__device__ __forceinline__ uint4 ld_global_predicated(bool pred, const void* from, uint32_t fill = 0) {
  uint4 w;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
      "mov.u32 %0, %6;\nmov.u32 %1, %6;\nmov.u32 %2, %6;\nmov.u32 %3, %6;\n"
      "@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
      : "l"(from), "r"(unsigned(pred)), "r"(fill));
  return w;
}
// Returns 16 bytes, or undefined words.
__device__ __forceinline__ uint4 ld_global_predicated_uninit(bool pred, const void* from) {
  uint4 w;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
      "@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
      : "l"(from), "r"(unsigned(pred)));
  return w;
}
template <class T>
__device__ __forceinline__ void st_global(T* to, const uint4& w) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w)
               : "memory");
}
__device__ __forceinline__ void st_global_predicated(bool pred, void* to, const uint4& w) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n@p st.global.v4.u32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to),
      "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w), "r"(unsigned(pred))
      : "memory");
}

// --- shared memory -------------------------------------------------------------------------------

// Returns the address of shared memory within its window, as the instructions below take it.
__device__ __forceinline__ uint32_t cast_smem_ptr_to_uint(const void* p) {
  return uint32_t(__cvta_generic_to_shared(p));
}
// Loads 16 bytes. The compiler never hoists the load or caches it in registers.
__device__ __forceinline__ uint4 ld_shared(uint32_t from) {
  uint4 w;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
               : "r"(from)
               : "memory");
  return w;
}
__device__ __forceinline__ uint4 ld_shared(const uint4* from) {
  return ld_shared(cast_smem_ptr_to_uint(from));
}
__device__ __forceinline__ void st_shared(uint32_t to, const uint4& w) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w)
               : "memory");
}

// --- clusters (sm_90) ----------------------------------------------------------------------------

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned r = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
#endif
  return r;
}
__device__ __forceinline__ unsigned cluster_size() {
  unsigned n = 1;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
#endif
  return n;
}
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// Sets *local = value in the shared memory of the CTA with that rank.
__device__ __forceinline__ void st_shared_cluster(float* local, unsigned rank, float value) {
#if __CUDA_ARCH__ >= 900
  uint32_t address = uint32_t(__cvta_generic_to_shared(local)), remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
#endif
}

// --- mbarrier (sm_90) ----------------------------------------------------------------------------

// One thread initialises a barrier before the first cluster_arrive() of its CTA. A phase completes
// when `count` arrivals and all expected bytes are in; waiters pass the phase's parity (0, 1, 0,
// ...).
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int count = 1) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(cast_smem_ptr_to_uint(barrier)), "r"(count)
               : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(cast_smem_ptr_to_uint(barrier)),
               "r"(bytes)
               : "memory");
#endif
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(cast_smem_ptr_to_uint(barrier)) : "memory");
#endif
}
// With kClusterScope other CTAs have written what is read next. An acquire at cluster scope invalidates L1,
// so waits on data of the own CTA use CTA scope.
template <bool kClusterScope = true>
__device__ __forceinline__ void mbarrier_wait_parity(const uint64_t* barrier, int parity) {
#if __CUDA_ARCH__ >= 900
  uint32_t done;
// A debug build sets this to the number of polls after which a wait counts as a deadlock.
#ifdef TIGON_MBARRIER_TRAP
  int polls = 0;
#endif
  do {
#ifdef TIGON_MBARRIER_TRAP
    if (++polls > TIGON_MBARRIER_TRAP) __trap();
#endif
    if constexpr (kClusterScope)
      asm volatile(
          "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;\n}"
          : "=r"(done)
          : "r"(cast_smem_ptr_to_uint(barrier)), "r"(parity)
          : "memory");
    else
      asm volatile(
          "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;\n}"
          : "=r"(done)
          : "r"(cast_smem_ptr_to_uint(barrier)), "r"(parity)
          : "memory");
  } while (done == 0);
#endif
}
// Sets *local = value in the shared memory of the CTA with that rank. Its 8 or 16 bytes complete on that
// CTA's barrier.
template <class T>
__device__ __forceinline__ void st_async(T* local, unsigned rank, const T& value, uint64_t* barrier) {
  static_assert(sizeof(T) == alignof(T) && (sizeof(T) == 8 || sizeof(T) == 16));
#if __CUDA_ARCH__ >= 900
  uint32_t to, remote_barrier;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(cast_smem_ptr_to_uint(local)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(remote_barrier)
      : "r"(cast_smem_ptr_to_uint(barrier)), "r"(rank));
  if constexpr (sizeof(T) == 8) {
    uint64_t v;
    memcpy(&v, &value, sizeof v);
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(to),
                 "l"(v), "r"(remote_barrier)
                 : "memory");
  } else {
    uint4 v;
    memcpy(&v, &value, sizeof v);
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
            to),
        "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(remote_barrier)
        : "memory");
  }
#endif
}

// --- matrices in registers -----------------------------------------------------------------------

// Computes d += a b with a [16, 16] (row, column) and b [16, 8] of bf16 pairs. In lane 4 t + q, a holds rows
// t and t + 8 in turn, at columns 2 q and then 2 q + 8; b holds column t at rows 2 q and 2 q + 8; d holds
// rows t (2 values) and t + 8 at column 2 q.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint4& a, uint2 b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}
// Does the same with 8 columns of a and 8 rows of b.
__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], uint2 a, uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(b));
}
// Transposes an 8 x 8 matrix of 16-bit values: lane 4 t + q holds row t at columns 2 q and 2 q + 1.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t rows) {
  uint32_t columns;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(columns) : "r"(rows));
  return columns;
}

// --- cp.async: copies from global to shared memory -----------------------------------------------

// Copies 16 bytes, or zeros if `bytes` is 0. Both addresses are aligned to 16 bytes. A thread may read what
// it copied itself after its wait, without a barrier.
__device__ __forceinline__ void cp_async(uint32_t to, const void* from, int bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async(void* to, const void* from, int bytes = 16) {
  cp_async(uint32_t(__cvta_generic_to_shared(to)), from, bytes);
}
// Copies 16 bytes, or nothing, without a branch, and brings the 128-byte line to L2.
__device__ __forceinline__ void cp_async_L2_128B(void* to, const void* from, int bytes = 16) {
  asm volatile(
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(uint32_t(__cvta_generic_to_shared(to))),
      "l"(from), "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void cp_async_predicated(bool pred, uint32_t to, const void* from) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p cp.async.cg.shared.global [%0], [%1], 16;\n}" ::"r"(to),
      "l"(from), "r"(unsigned(pred))
      : "memory");
}
// Copies the first `bytes` bytes (an even number; at most 16) and reads none behind them: a 16-byte cp.async
// reads all 16 bytes whatever its source size. A last 16-bit element is copied synchronously, since cp.async
// has no 2-byte form.
__device__ __forceinline__ void cp_async_partial(uint32_t to, const void* from, int bytes) {
  if (bytes >= 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    return;
  }
#pragma unroll
  for (int i = 0; i < 16; i += 4)
    if (i + 4 <= bytes)
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to + i),
                   "l"(static_cast<const char*>(from) + i)
                   : "memory");
  if (bytes % 4 != 0) {
    const uint16_t last = *(static_cast<const uint16_t*>(from) + bytes / 2 - 1);
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to + bytes - 2), "h"(last) : "memory");
  }
}
// Makes a group of the copies since the last commit.
__device__ __forceinline__ void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Returns when at most the last `Pending` groups are incomplete.
template <int Pending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}
// Does the same for a number known at run time; more than 8 waits as 8 does.
__device__ __forceinline__ void cp_async_wait_group(int pending) {
  switch (pending) {
    case 0: return cp_async_wait_group<0>();
    case 1: return cp_async_wait_group<1>();
    case 2: return cp_async_wait_group<2>();
    case 3: return cp_async_wait_group<3>();
    case 4: return cp_async_wait_group<4>();
    case 5: return cp_async_wait_group<5>();
    case 6: return cp_async_wait_group<6>();
    case 7: return cp_async_wait_group<7>();
    default: return cp_async_wait_group<8>();
  }
}

// Brings `bytes` (a multiple of 16) from a 16-byte boundary on into L2.
__device__ __forceinline__ void cp_async_bulk_prefetch_L2(const void* from, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)), "r"(bytes)
               : "memory");
#endif
}

// Makes a bulk copy by one thread (sm_90). `bytes` is a multiple of 16, and the bytes complete on an
// mbarrier.
__device__ __forceinline__ void cp_async_bulk(uint32_t to, const void* from, int bytes,
                                              const uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(uint32_t(__cvta_generic_to_shared(barrier)))
      : "memory");
#endif
}
// Orders ordinary stores to shared memory before later bulk copies to the same place. The thread
// that issues the copy calls it once it knows of the stores.
__device__ __forceinline__ void fence_proxy_async() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// --- launches and registers (sm_90) --------------------------------------------------------------

// Lets the next kernel in the stream start early: programmatic dependent launch (LaunchConfig::pdl).
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Waits until the previous kernel in the stream has ended and its writes are visible.
__device__ __forceinline__ void griddepcontrol_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Moves registers between warpgroups of a kernel with one CTA per SM: each thread of the calling warpgroup
// has `Count` from here on. Does nothing unless compiled for sm_90a.
template <int Count>
__device__ __forceinline__ void setmaxnreg_dec() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
#endif
}
template <int Count>
__device__ __forceinline__ void setmaxnreg_inc() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
#endif
}

}  // namespace tigon::cuda
