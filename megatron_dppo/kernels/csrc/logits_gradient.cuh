// The backward's only pass over the logits:
//   d loss / d z_j = (g (onehot_j - p_j) - h p_j (ln p_j + H)) / temperature
// for g = d loss / d log_prob and h = d loss / d entropy. Reads and writes each element once, possibly in place.
#pragma once

#include "common.cuh"

namespace dppo {

struct LogitsGradientArguments {
  const void* logits;
  void* gradient;
  int64_t row_stride;
  int64_t gradient_stride;
  int num_columns;
  int width;
  int vocab_start;
  const int64_t* targets;
  const float* rows;
  int64_t rows_stride;
  const int64_t* sources;
  float inverse_temperature;
  const float* upstream;
};

// Values for every column of a row. Except at the target, d loss / d z = p (constant + slope log2 p).
struct RowGradient {
  float scale;
  float highest, log2_sum;
  float constant, slope;
  float of_log_prob;  // times upstream over temperature
  int64_t target;     // column of this shard, or outside of it

  __device__ __forceinline__ bool is_zero() const { return of_log_prob == 0.f && slope == 0.f; }

  template <bool kWithEntropy>
  __device__ __forceinline__ float beside_target(float logit) const {
    const float log2_prob = (scaled(logit, scale) - highest) - log2_sum;
    const float prob = fast_exp2(log2_prob);
    if (!kWithEntropy) return prob * constant;
    return prob * fmaf(slope, fmaxf(log2_prob, -1000.f), constant);  // 0 * -inf is 0 here
  }

  template <bool kWithEntropy>
  __device__ __forceinline__ float at(float logit, int column) const {
    const float value = beside_target<kWithEntropy>(logit);
    return column == target ? value + of_log_prob : value;
  }
};

template <bool kWithEntropy>
__device__ __forceinline__ RowGradient row_gradient(const LogitsGradientArguments& in, int64_t source) {
  const float* row = in.rows + source;
  const float factor = in.inverse_temperature * (in.upstream == nullptr ? 1.f : *in.upstream);
  // A row without gradient keeps gradient 0 for any factor: 0 * inf is 0 here.
  const float of_log_prob = row[DPPO_LOG_PROB_GRADIENT * in.rows_stride];
  const float of_entropy = kWithEntropy ? row[DPPO_ENTROPY_GRADIENT * in.rows_stride] : 0.f;
  RowGradient result;
  result.scale = in.inverse_temperature * kLog2E;
  result.highest = row[DPPO_HIGHEST * in.rows_stride];
  result.log2_sum = row[DPPO_LOG2_SUM * in.rows_stride];
  result.of_log_prob = of_log_prob == 0.f ? 0.f : of_log_prob * factor;
  result.constant = -result.of_log_prob;
  result.slope = 0.f;
  if (of_entropy != 0.f) {
    result.constant -= of_entropy * factor * row[DPPO_ENTROPY * in.rows_stride];
    result.slope = -(of_entropy * factor) * kLn2;
  }
  result.target = in.targets[source] - in.vocab_start;
  return result;
}

// Columns [first, last) of a row.
template <typename T>
__device__ __forceinline__ void write_zeros(T* row, int first, int last) {
  const Cut<T> cut(row + first, last - first);
  uint4* vectors = reinterpret_cast<uint4*>(row + first + cut.head);
  const int thread = threadIdx.x;
  for (int at = thread; at < cut.num_vectors; at += blockDim.x) store_streaming(vectors + at, make_uint4(0, 0, 0, 0));
  if (thread < cut.num_edges) row[first + cut.edge(thread)] = Packed<T>::narrow(0.f);
}

template <typename T, bool kWithEntropy>
__device__ __forceinline__ uint4 vector_gradient(const uint4& loaded, const RowGradient& gradient) {
  float values[Packed<T>::kSize];
  Packed<T>::unpack(loaded, values);
#pragma unroll
  for (int i = 0; i < Packed<T>::kSize; ++i) values[i] = gradient.template beside_target<kWithEntropy>(values[i]);
  return Packed<T>::pack(values);
}

// The 16 bytes from `shift` bytes after an address that is a multiple of 16.
__device__ __forceinline__ uint4 load_shifted(const uint4* address, unsigned shift) {
  const uint4 low = address[0], high = address[1];
  uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 6; ++i) words[i] = shift & 8 ? words[i + 2] : words[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) words[i] = shift & 4 ? words[i + 1] : words[i];
  const unsigned bits = shift % 4 * 8;
  return make_uint4(__funnelshift_r(words[0], words[1], bits), __funnelshift_r(words[1], words[2], bits),
                    __funnelshift_r(words[2], words[3], bits), __funnelshift_r(words[3], words[4], bits));
}

template <bool kIsShifted>
__device__ __forceinline__ uint4 load(const uint4* address, unsigned shift) {
  return kIsShifted ? load_shifted(address, shift) : load_streaming(address);
}

// The columns of a row that are tokens: aligned stores, and loads at the same or, with kIsShifted, another distance
// from a multiple of 16 bytes. Threads get vectors as in row_statistics. The target's column is written like any
// other, and then again by the same thread, which read its logit before.
template <typename T, bool kWithEntropy, bool kIsShifted>
__device__ __forceinline__ void write_gradient(const T* row, T* out, Cut<T> cut, const RowGradient& gradient) {
  constexpr int kSize = Packed<T>::kSize;
  constexpr int kCount = kIsShifted ? kUnroll / 2 : kUnroll;  // twice as many loads for each
  constexpr int kChunk = kCount * kWarpSize;
  const int thread = threadIdx.x;
  const int warp = thread / kWarpSize;
  const unsigned shift = reinterpret_cast<uintptr_t>(row + cut.head) % sizeof(uint4);
  const uint4* vectors =
      reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(row + cut.head) - (kIsShifted ? shift : 0));
  uint4* out_vectors = reinterpret_cast<uint4*>(out + cut.head);

  const int64_t past_head = gradient.target - cut.head;
  const int target_vector = past_head >= 0 && past_head < static_cast<int64_t>(cut.num_vectors) * kSize
                                ? static_cast<int>(past_head) / kSize
                                : -1;
  const int warps = blockDim.x / kWarpSize;
  const bool has_target = target_vector >= 0 && target_vector / kChunk % warps == warp &&
                          target_vector % kWarpSize == thread % kWarpSize;
  float target_logit = 0.f;
  if (has_target) target_logit = Packed<T>::widen(row[gradient.target]);

  uint4 loaded[kCount];
  int at = warp * kChunk + thread % kWarpSize;
  for (; at + (kCount - 1) * kWarpSize < cut.num_vectors; at += kCount * blockDim.x) {
#pragma unroll
    for (int u = 0; u < kCount; ++u) loaded[u] = load<kIsShifted>(vectors + at + u * kWarpSize, shift);
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      store_streaming(out_vectors + at + u * kWarpSize, vector_gradient<T, kWithEntropy>(loaded[u], gradient));
    }
  }
#pragma unroll
  for (int u = 0; u < kCount; ++u) {
    const int vector = at + u * kWarpSize;
    if (vector < cut.num_vectors) loaded[u] = load<kIsShifted>(vectors + vector, shift);
  }
#pragma unroll
  for (int u = 0; u < kCount; ++u) {
    const int vector = at + u * kWarpSize;
    if (vector < cut.num_vectors) {
      store_streaming(out_vectors + vector, vector_gradient<T, kWithEntropy>(loaded[u], gradient));
    }
  }
  if (has_target) {
    out[gradient.target] =
        Packed<T>::narrow(gradient.template beside_target<kWithEntropy>(target_logit) + gradient.of_log_prob);
  }
  if (thread < cut.num_edges) {
    const int column = cut.edge(thread);
    out[column] = Packed<T>::narrow(gradient.template at<kWithEntropy>(Packed<T>::widen(row[column]), column));
  }
}

// One block per row of the result.
template <typename T, bool kWithEntropy>
__global__ void __launch_bounds__(kMostThreadsPerRow, kBlocksPerMultiprocessor)
    logits_gradient(const LogitsGradientArguments in) {
  const int64_t index = blockIdx.x;
  const int64_t source = in.sources == nullptr ? index : in.sources[index];
  const T* row = static_cast<const T*>(in.logits) + source * in.row_stride;
  T* out = static_cast<T*>(in.gradient) + index * in.gradient_stride;
  const RowGradient gradient = row_gradient<kWithEntropy>(in, source);
  if (gradient.is_zero()) {
    write_zeros(out, 0, in.width);
    return;
  }
  Cut<T> cut(out, in.num_columns);
  if ((reinterpret_cast<uintptr_t>(row) - reinterpret_cast<uintptr_t>(out)) % sizeof(uint4) == 0) {
    write_gradient<T, kWithEntropy, false>(row, out, cut, gradient);
  } else {
    cut.leave_last_vector();  // the 16 bytes after it may not exist
    write_gradient<T, kWithEntropy, true>(row, out, cut, gradient);
  }
  write_zeros(out, in.num_columns, in.width);
}

}  // namespace dppo
