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

// What every column of a row needs.
struct RowGradient {
  float scale;
  float highest, log2_sum, entropy;
  float of_log_prob, of_entropy;  // times upstream over temperature
  int64_t target;                 // column of this shard, or outside of it
  int num_columns;

  template <bool kWithEntropy>
  __device__ __forceinline__ float at(float logit, int column) const {
    const float log2_prob = (scaled(logit, scale) - highest) - log2_sum;
    const float prob = fast_exp2(log2_prob);
    float value = -of_log_prob * prob;
    if (kWithEntropy) {
      const float log_prob = fmaxf(log2_prob, -1e30f) * kLn2;  // 0 * -inf is 0 here
      value = fmaf(-of_entropy * prob, log_prob + entropy, value);
    }
    if (column == target) value += of_log_prob;
    return column < num_columns ? value : 0.f;
  }
};

template <bool kWithEntropy>
__device__ __forceinline__ RowGradient row_gradient(const LogitsGradientArguments& in, int64_t source) {
  const float* row = in.rows + source;
  const float factor = in.inverse_temperature * (in.upstream == nullptr ? 1.f : *in.upstream);
  // A row without gradient stays without, whatever the factor: 0 * inf is 0 here.
  const float of_log_prob = row[DPPO_LOG_PROB_GRADIENT * in.rows_stride];
  const float of_entropy = kWithEntropy ? row[DPPO_ENTROPY_GRADIENT * in.rows_stride] : 0.f;
  RowGradient result;
  result.scale = in.inverse_temperature * kLog2E;
  result.highest = row[DPPO_HIGHEST * in.rows_stride];
  result.log2_sum = row[DPPO_LOG2_SUM * in.rows_stride];
  result.entropy = row[DPPO_ENTROPY * in.rows_stride];
  result.of_log_prob = of_log_prob == 0.f ? 0.f : of_log_prob * factor;
  result.of_entropy = of_entropy == 0.f ? 0.f : of_entropy * factor;
  result.target = in.targets[source] - in.vocab_start;
  result.num_columns = in.num_columns;
  return result;
}

template <typename T>
__device__ __forceinline__ void write_zeros(T* row, int width) {
  const int count = num_vectors<T>(row, width);
  uint4* vectors = reinterpret_cast<uint4*>(row);
  const uint4 zeros = make_uint4(0, 0, 0, 0);
  for (int at = threadIdx.x; at < count; at += kThreadsPerRow) store_streaming(vectors + at, zeros);
  for (int column = count * Packed<T>::kSize + threadIdx.x; column < width; column += kThreadsPerRow) {
    row[column] = Packed<T>::narrow(0.f);
  }
}

// Gradients of the logits of one vector, the first of which is column `first`.
template <typename T, bool kWithEntropy>
__device__ __forceinline__ uint4 vector_gradient(const uint4& loaded, const RowGradient& gradient, int first) {
  float values[Packed<T>::kSize];
  Packed<T>::unpack(loaded, values);
#pragma unroll
  for (int i = 0; i < Packed<T>::kSize; ++i) {
    values[i] = gradient.template at<kWithEntropy>(values[i], first + i);
  }
  return Packed<T>::pack(values);
}

template <typename T, bool kWithEntropy>
__device__ __forceinline__ void write_gradient(const T* row, T* out, int width, const RowGradient& gradient) {
  constexpr int kSize = Packed<T>::kSize;
  const int count = min(num_vectors<T>(row, width), num_vectors<T>(out, width));
  const uint4* vectors = reinterpret_cast<const uint4*>(row);
  uint4* out_vectors = reinterpret_cast<uint4*>(out);
  int at = threadIdx.x;
  for (; at + (kUnroll - 1) * kThreadsPerRow < count; at += kUnroll * kThreadsPerRow) {
    uint4 loaded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) loaded[u] = load_streaming(vectors + at + u * kThreadsPerRow);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int vector = at + u * kThreadsPerRow;
      store_streaming(out_vectors + vector,
                      vector_gradient<T, kWithEntropy>(loaded[u], gradient, vector * kSize));
    }
  }
  for (; at < count; at += kThreadsPerRow) {
    const uint4 loaded = load_streaming(vectors + at);
    store_streaming(out_vectors + at, vector_gradient<T, kWithEntropy>(loaded, gradient, at * kSize));
  }
  for (int column = count * kSize + threadIdx.x; column < width; column += kThreadsPerRow) {
    const float logit = Packed<T>::widen(row[column]);
    out[column] = Packed<T>::narrow(gradient.template at<kWithEntropy>(logit, column));
  }
}

// One block per row of the result.
template <typename T, bool kWithEntropy>
__global__ void __launch_bounds__(kThreadsPerRow) logits_gradient(const LogitsGradientArguments in) {
  const int64_t index = blockIdx.x;
  const int64_t source = in.sources == nullptr ? index : in.sources[index];
  const T* row = static_cast<const T*>(in.logits) + source * in.row_stride;
  T* out = static_cast<T*>(in.gradient) + index * in.gradient_stride;
  const RowGradient gradient = row_gradient<kWithEntropy>(in, source);
  if (gradient.of_log_prob == 0.f && gradient.of_entropy == 0.f) {
    write_zeros(out, in.width);
  } else {
    write_gradient<T, kWithEntropy>(row, out, in.width, gradient);
  }
}

}  // namespace dppo
