// What all kernels share: 16-byte loads and stores of both dtypes, and a softmax's statistics that can be merged.
// The same source compiles for the host through host_shim.h (DPPO_HOST).
#pragma once

#ifdef DPPO_HOST
#include "host_shim.h"
#else
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>
#endif

#include "capi.h"

namespace dppo {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr int kWarpSize = 32;
constexpr unsigned kWholeWarp = 0xffffffffu;
// Loads in flight per thread: what hides the memory's latency.
constexpr int kUnroll = 4;
#ifdef DPPO_HOST
constexpr int kThreadsPerRow = 128;
#else
constexpr int kThreadsPerRow = 512;
#endif

#ifndef DPPO_HOST
// Logits are read once and gradients written once: neither is worth a place in the cache.
__device__ __forceinline__ uint4 load_streaming(const uint4* address) {
  uint4 value;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}
__device__ __forceinline__ void store_streaming(uint4* address, uint4 value) { __stcs(address, value); }
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif

// fminf and fmaxf drop a NaN; these keep it.
__device__ __forceinline__ float at_least(float x, float low) { return x < low ? low : x; }
__device__ __forceinline__ float at_most(float x, float high) { return x > high ? high : x; }

template <typename T>
struct Packed;

template <>
struct Packed<float> {
  static constexpr int kSize = 4;
  __device__ static __forceinline__ void unpack(const uint4& bits, float* values) {
    values[0] = __uint_as_float(bits.x);
    values[1] = __uint_as_float(bits.y);
    values[2] = __uint_as_float(bits.z);
    values[3] = __uint_as_float(bits.w);
  }
  __device__ static __forceinline__ uint4 pack(const float* values) {
    return make_uint4(__float_as_uint(values[0]), __float_as_uint(values[1]), __float_as_uint(values[2]),
                      __float_as_uint(values[3]));
  }
  __device__ static __forceinline__ float widen(float value) { return value; }
  __device__ static __forceinline__ float narrow(float value) { return value; }
};

template <>
struct Packed<__nv_bfloat16> {
  static constexpr int kSize = 8;
  __device__ static __forceinline__ void unpack(const uint4& bits, float* values) {
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[2 * i] = __uint_as_float(words[i] << 16);
      values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
  __device__ static __forceinline__ uint4 pack(const float* values) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t low = __bfloat16_as_ushort(narrow(values[2 * i]));
      const uint32_t high = __bfloat16_as_ushort(narrow(values[2 * i + 1]));
      words[i] = low | (high << 16);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
  __device__ static __forceinline__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
  __device__ static __forceinline__ __nv_bfloat16 narrow(float value) { return __float2bfloat16_rn(value); }
};

// How many 16-byte vectors a row's columns hold; none where the row is not aligned to them.
template <typename T>
__device__ __forceinline__ int num_vectors(const void* row, int num_columns) {
  return reinterpret_cast<uintptr_t>(row) % sizeof(uint4) == 0 ? num_columns / Packed<T>::kSize : 0;
}

// A logit in base 2. The product is rounded before anything is subtracted from it, here and in the gradient: so
// the largest column's distance to the maximum is exactly 0, and log pi -> 0 is not lost in rounding.
__device__ __forceinline__ float scaled(float logit, float scale) { return __fmul_rn(logit, scale); }

// A part of a row: m = max y, s = sum 2^(y - m), w = sum 2^(y - m) (y - m). The sum's logarithm and the maximum
// are kept apart up to the end, as their sum would cost the gradient two digits.
struct Statistics {
  float m, s, w;
};

__device__ __forceinline__ Statistics no_statistics() { return Statistics{-INFINITY, 0.f, 0.f}; }

// The same part, relative to a higher maximum.
__device__ __forceinline__ void raise_maximum(Statistics& part, float m) {
  if (part.m == m) return;
  if (part.m != -INFINITY) {  // otherwise s and w are 0, or s a NaN to be kept
    const float below = part.m - m;
    const float factor = exp2f(below);
    part.w = factor * (part.w + below * part.s);
    part.s *= factor;
  }
  part.m = m;
}

__device__ __forceinline__ Statistics merge(Statistics a, Statistics b) {
  const float m = fmaxf(a.m, b.m);
  if (m != -INFINITY) {
    raise_maximum(a, m);
    raise_maximum(b, m);
  }
  return Statistics{m, a.s + b.s, a.w + b.w};
}

template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kWholeWarp, value, offset);
  return value;
}

__device__ __forceinline__ int warp_max(int value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    const int other = __shfl_xor_sync(kWholeWarp, value, offset);
    value = other > value ? other : value;
  }
  return value;
}

}  // namespace dppo
