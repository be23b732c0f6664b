// The forward's only pass over the logits: what each row must tell the other shards, [4 + K] numbers.
#pragma once

#include "common.cuh"

namespace dppo {

struct RowStatisticsArguments {
  const void* logits;
  int64_t row_stride;
  int num_columns;
  int vocab_start;
  const int64_t* targets;
  const int32_t* topk_ids;
  int top_k;
  const uint8_t* is_learning;
  float scale;  // inverse temperature times log2(e)
  float* statistics;
};

// Adds `size` logits to a part of the row; they become base-2 in place.
template <int size, bool kWithEntropy>
__device__ __forceinline__ void accumulate(Statistics& part, float* values, float scale) {
  float highest = -INFINITY;
#pragma unroll
  for (int i = 0; i < size; ++i) {
    values[i] = scaled(values[i], scale);
    highest = fmaxf(highest, values[i]);
  }
  if (highest > part.m) raise_maximum(part, highest);
  if (part.m == -INFINITY) {  // nothing yet but -inf, which counts for nothing, and NaN, which must be seen
#pragma unroll
    for (int i = 0; i < size; ++i) {
      if (values[i] != values[i]) part.s = values[i];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < size; ++i) {
    const float below = values[i] - part.m;
    const float power = fast_exp2(below);
    part.s += power;
    if (kWithEntropy) part.w = fmaf(power, fmaxf(below, -1e30f), part.w);  // 0 * -inf is 0 here
  }
}

// Every thread's share of the row, merged over the block in a fixed order; thread 0 gets the whole.
__device__ __forceinline__ Statistics merge_over_block(Statistics part) {
  constexpr int kWarps = kThreadsPerRow / kWarpSize;
  __shared__ Statistics of_warps[kWarps];
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    Statistics other;
    other.m = __shfl_xor_sync(kWholeWarp, part.m, offset);
    other.s = __shfl_xor_sync(kWholeWarp, part.s, offset);
    other.w = __shfl_xor_sync(kWholeWarp, part.w, offset);
    part = merge(part, other);
  }
  if (lane == 0) of_warps[warp] = part;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int other = 1; other < kWarps; ++other) part = merge(part, of_warps[other]);
  }
  return part;
}

template <typename T, bool kWithEntropy>
__device__ __forceinline__ Statistics part_of_thread(const T* row, const RowStatisticsArguments& in) {
  constexpr int kSize = Packed<T>::kSize;
  const uint4* vectors = reinterpret_cast<const uint4*>(row);
  const int count = num_vectors<T>(row, in.num_columns);
  float values[kSize];
  Statistics parts[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) parts[u] = no_statistics();

  int at = threadIdx.x;
  for (; at + (kUnroll - 1) * kThreadsPerRow < count; at += kUnroll * kThreadsPerRow) {
    uint4 loaded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) loaded[u] = load_streaming(vectors + at + u * kThreadsPerRow);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      Packed<T>::unpack(loaded[u], values);
      accumulate<kSize, kWithEntropy>(parts[u], values, in.scale);
    }
  }
  for (; at < count; at += kThreadsPerRow) {
    Packed<T>::unpack(load_streaming(vectors + at), values);
    accumulate<kSize, kWithEntropy>(parts[0], values, in.scale);
  }
  for (int column = count * kSize + threadIdx.x; column < in.num_columns; column += kThreadsPerRow) {
    values[0] = Packed<T>::widen(row[column]);
    accumulate<1, kWithEntropy>(parts[0], values, in.scale);
  }
#pragma unroll
  for (int u = 1; u < kUnroll; ++u) parts[0] = merge(parts[0], parts[u]);
  return parts[0];
}

// One block per row. Two at a time leave a thread 64 registers, so that nothing spills, and keep loads enough in
// flight.
template <typename T, bool kWithEntropy>
__global__ void __launch_bounds__(kThreadsPerRow, 2) row_statistics(const RowStatisticsArguments in) {
  const int64_t index = blockIdx.x;
  float* out = in.statistics + index * (4 + in.top_k);
  const bool is_read = in.is_learning == nullptr || in.is_learning[index] != 0;
  const T* row = static_cast<const T*>(in.logits) + index * in.row_stride;
  for (int k = threadIdx.x; k <= in.top_k; k += kThreadsPerRow) {
    const int64_t id = k == 0 ? in.targets[index] : in.topk_ids[index * in.top_k + k - 1];
    const int64_t column = id - in.vocab_start;
    const bool is_here = is_read && id >= 0 && column >= 0 && column < in.num_columns;
    out[3 + k] = is_here ? scaled(Packed<T>::widen(row[column]), in.scale) : 0.f;
  }
  Statistics whole = no_statistics();
  if (is_read) whole = merge_over_block(part_of_thread<T, kWithEntropy>(row, in));
  if (threadIdx.x == 0) {
    out[0] = whole.m;
    out[1] = whole.s;
    out[2] = kWithEntropy ? whole.w : 0.f;  // what merging left there is not the whole sum
  }
}

}  // namespace dppo
