// The forward's only pass over the logits: computes the [4 + K] numbers of each row that the shards exchange.
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

// The next vector becomes the first: a loop over registers that is not unrolled.
template <int count>
__device__ __forceinline__ void shift_down(uint4* vectors) {
#pragma unroll
  for (int next = 1; next < count; ++next) vectors[next - 1] = vectors[next];
}

// Sums over some logits: sum 2^(y - m), and sum 2^(y - m) (y - m).
struct Sums {
  float s, w;
};

template <typename T, int count, bool kWithEntropy, bool kHasInfinities>
__device__ __forceinline__ void add(Sums& sums, const uint4* vectors, float m, float scale) {
#pragma unroll
  for (int v = 0; v < count; ++v) {
    float values[Packed<T>::kSize];
    Packed<T>::unpack(vectors[v], values);
#pragma unroll
    for (int i = 0; i < Packed<T>::kSize; ++i) {
      const float below = scaled(values[i], scale) - m;
      const float power = fast_exp2(below);
      sums.s += power;
      if (kWithEntropy) sums.w = fmaf(power, kHasInfinities ? fmaxf(below, -1e30f) : below, sums.w);
    }
  }
}

// The reference that is subtracted from logits: the maximum, or 0 if the maximum is -inf, so that logits of
// -inf add nothing and a NaN stays visible.
__device__ __forceinline__ float reference(float m) { return m == -INFINITY ? 0.f : m; }

// Adds vectors of logits to a part of the row: one comparison with its maximum for all of them, and separate sums,
// which round less. A logit of -inf makes their w a NaN, by 0 * -inf. That is rare, so the vectors are then added
// again, one vector at a time to save registers. The vectors are shifted afterwards.
template <typename T, int count, bool kWithEntropy>
__device__ __forceinline__ void accumulate(Statistics& part, uint4* vectors, float scale) {
  const float highest = scaled(Packed<T>::template highest<count>(vectors), scale);
  if (highest > part.m) raise_maximum(part, highest);
  const float m = reference(part.m);
  Sums sums{0.f, 0.f};
  add<T, count, kWithEntropy, false>(sums, vectors, m, scale);
  if (kWithEntropy && sums.w != sums.w) {
    sums = Sums{0.f, 0.f};
#pragma unroll 1
    for (int v = 0; v < count; ++v) {
      add<T, 1, kWithEntropy, true>(sums, vectors, m, scale);
      shift_down<count>(vectors);
    }
  }
  part.s += sums.s;
  part.w += sums.w;
}

template <bool kWithEntropy>
__device__ __forceinline__ void accumulate_one(Statistics& part, float y) {
  if (y > part.m) raise_maximum(part, y);
  const float below = y - reference(part.m);
  const float power = fast_exp2(below);
  part.s += power;
  if (kWithEntropy) part.w = fmaf(power, fmaxf(below, -1e30f), part.w);
}

// Merges the lanes' parts in a fixed order; every lane gets the total. The maximum comes first, so that each part
// is rescaled once.
__device__ __forceinline__ Statistics merge_over_warp(Statistics part) {
  float m = part.m;
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    m = fmaxf(m, __shfl_xor_sync(kWholeWarp, m, offset));
  }
  raise_maximum(part, m);
  return Statistics{m, warp_sum(part.s), warp_sum(part.w)};
}

// Merges the threads' parts over the block; the first warp gets the total.
__device__ __forceinline__ Statistics merge_over_block(Statistics part) {
  __shared__ Statistics of_warps[kMostThreadsPerRow / kWarpSize];
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  part = merge_over_warp(part);
  if (lane == 0) of_warps[warp] = part;
  __syncthreads();
  if (warp > 0) return part;
  return merge_over_warp(lane < static_cast<int>(blockDim.x) / kWarpSize ? of_warps[lane] : no_statistics());
}

// A warp takes chunks of neighbouring vectors, kUnroll for each lane, and the block's warps take turns. So the
// distance between loads does not depend on the size of the block.
template <typename T, bool kWithEntropy>
__device__ __forceinline__ Statistics part_of_thread(const T* row, const RowStatisticsArguments& in) {
  const Cut<T> cut(row, in.num_columns);
  const uint4* vectors = reinterpret_cast<const uint4*>(row + cut.head);
  const int thread = threadIdx.x;
  Statistics part = no_statistics();

  int at = thread / kWarpSize * (kUnroll * kWarpSize) + thread % kWarpSize;
  for (; at + (kUnroll - 1) * kWarpSize < cut.num_vectors; at += kUnroll * blockDim.x) {
    const uint4* first = vectors + at;
    uint4 loaded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) loaded[u] = load_streaming(first + u * kWarpSize);
    accumulate<T, kUnroll, kWithEntropy>(part, loaded, in.scale);
  }
  // The row's last chunk, of less than kUnroll for this lane; its loads are in flight together, too.
  const uint4* first = vectors + at;
  uint4 rest[kUnroll - 1];
#pragma unroll
  for (int u = 0; u < kUnroll - 1; ++u) {
    if (at + u * kWarpSize < cut.num_vectors) rest[u] = load_streaming(first + u * kWarpSize);
  }
#pragma unroll 1
  for (; at < cut.num_vectors; at += kWarpSize) {
    accumulate<T, 1, kWithEntropy>(part, rest, in.scale);
    shift_down<kUnroll - 1>(rest);
  }
  if (thread < cut.num_edges) {
    accumulate_one<kWithEntropy>(part, scaled(Packed<T>::widen(row[cut.edge(thread)]), in.scale));
  }
  return part;
}

// Address of the id that a thread looks up: the target for the first thread, the Top-K ids for the next ones.
__device__ __forceinline__ const void* chosen_address(const RowStatisticsArguments& in, int64_t index, int thread) {
  static_assert(kFewestThreadsPerRow > DPPO_MAX_TOP_K, "a thread for the target, and one for each of the Top-K");
  if (thread == 0) return in.targets + index;
  return in.topk_ids + (index * in.top_k + thread - 1);
}

// One block per row. Its ids are on their way to the cache while the row is read, and cost no register until then;
// their logits are on their way while the threads' parts are merged.
template <typename T, bool kWithEntropy>
__global__ void __launch_bounds__(kMostThreadsPerRow, kBlocksPerMultiprocessor)
    row_statistics(const RowStatisticsArguments in) {
  const int64_t index = blockIdx.x;
  const int thread = threadIdx.x;
  if (thread <= in.top_k) prefetch(chosen_address(in, index, thread));
  const bool is_read = in.is_learning == nullptr || in.is_learning[index] != 0;
  const T* row = static_cast<const T*>(in.logits) + index * in.row_stride;
  Statistics whole = no_statistics();
  float chosen = 0.f;
  if (is_read) {
    const Statistics part = part_of_thread<T, kWithEntropy>(row, in);
    if (thread <= in.top_k) {
      const void* address = chosen_address(in, index, thread);
      const int64_t id = thread == 0 ? *static_cast<const int64_t*>(address) : *static_cast<const int32_t*>(address);
      const int64_t column = id - in.vocab_start;
      if (id >= 0 && column >= 0 && column < in.num_columns) {
        chosen = scaled(Packed<T>::widen(row[column]), in.scale);
      }
    }
    whole = merge_over_block(part);
  }
  float* out = in.statistics + index * (4 + in.top_k);
  if (thread <= in.top_k) out[3 + thread] = chosen;
  if (thread == 0) {
    out[0] = whole.m;
    out[1] = whole.s;
    out[2] = kWithEntropy ? whole.w : 0.f;  // without entropy, merging leaves an incomplete sum in whole.w
  }
}

}  // namespace dppo
