// Code of all kernels: 16-byte loads and stores of both dtypes, and a softmax's statistics that can be merged.
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
// Vectors of 16 bytes that a thread has in flight, to hide the memory's latency.
constexpr int kUnroll = 4;
// Threads of a block, which processes one row. Three of the largest blocks, or the same number of threads in
// smaller blocks, fit a multiprocessor if a thread takes at most 40 registers: 96 KiB of loads in flight.
constexpr int kMostThreadsPerRow = 512;
constexpr int kFewestThreadsPerRow = 128;
constexpr int kBlocksPerMultiprocessor = 3;

#ifndef DPPO_HOST
// Logits are read once and gradients written once, so neither needs to stay in the cache.
__device__ __forceinline__ uint4 load_streaming(const uint4* address) {
  uint4 value;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}
__device__ __forceinline__ void store_streaming(uint4* address, uint4 value) { __stcs(address, value); }
__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Pairwise maximum of two pairs of bfloat16; a number wins over a NaN.
__device__ __forceinline__ uint32_t max_of_pairs(uint32_t a, uint32_t b) {
  uint32_t highest;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(highest) : "r"(a), "r"(b));
  return highest;
}
// Two numbers as bfloat16, the first in the lower bits.
__device__ __forceinline__ uint32_t pair_of(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
#endif

// Number of threads for a row of that many bytes. Each thread gets at least 16 vectors if the row is long enough,
// so that merging does not dominate in a narrow shard's rows. There are enough threads to gather a Top-K at once.
inline int threads_per_row(int64_t row_bytes) {
  int threads = kMostThreadsPerRow;
  while (threads > kFewestThreadsPerRow && row_bytes < threads * 16 * static_cast<int64_t>(sizeof(uint4))) {
    threads /= 2;
  }
  return threads;
}

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
  // The largest of a vector's numbers; NaN only if all of them are NaN.
  template <int count>
  __device__ static __forceinline__ float highest(const uint4* vectors) {
    float result = -INFINITY;
#pragma unroll
    for (int v = 0; v < count; ++v) {
      float values[kSize];
      unpack(vectors[v], values);
#pragma unroll
      for (int i = 0; i < kSize; ++i) result = fmaxf(result, values[i]);
    }
    return result;
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
    return make_uint4(pair_of(values[0], values[1]), pair_of(values[2], values[3]), pair_of(values[4], values[5]),
                      pair_of(values[6], values[7]));
  }
  // As for float, two at a time.
  template <int count>
  __device__ static __forceinline__ float highest(const uint4* vectors) {
    uint32_t pair = 0xff80ff80u;  // -inf twice
#pragma unroll
    for (int v = 0; v < count; ++v) {
      pair = max_of_pairs(pair, max_of_pairs(vectors[v].x, vectors[v].y));
      pair = max_of_pairs(pair, max_of_pairs(vectors[v].z, vectors[v].w));
    }
    return fmaxf(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  }
  __device__ static __forceinline__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
  __device__ static __forceinline__ __nv_bfloat16 narrow(float value) { return __float2bfloat16_rn(value); }
};

// Columns [0, num_columns) of a row, cut at its addresses that are multiples of 16: a head, vectors, a tail.
// Head and tail together are the edges, each shorter than a vector.
template <typename T>
struct Cut {
  int head;         // columns
  int num_vectors;  // from column `head` on
  int num_edges;    // columns of head and tail
  int num_columns;

  __device__ __forceinline__ Cut(const T* row, int columns) : num_columns(columns) {
    const int past = static_cast<int>(reinterpret_cast<uintptr_t>(row) % sizeof(uint4) / sizeof(T));
    head = min((Packed<T>::kSize - past) % Packed<T>::kSize, columns);
    num_vectors = (columns - head) / Packed<T>::kSize;
    num_edges = columns - num_vectors * Packed<T>::kSize;
  }
  // Makes the last vector, if there is one, a part of the edges: these are then shorter than two vectors.
  __device__ __forceinline__ void leave_last_vector() {
    if (num_vectors == 0) return;
    num_vectors -= 1;
    num_edges += Packed<T>::kSize;
  }
  // Column of the edge `index`: the head's come first.
  __device__ __forceinline__ int edge(int index) const {
    return index < head ? index : num_columns - num_edges + index;
  }
};

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
