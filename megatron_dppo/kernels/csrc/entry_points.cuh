// The functions of capi.h: checks, choice of the kernel's instance, launch. A file that includes this first defines
// `dppo::launch(kernel, num_blocks, threads_per_block, stream, arguments)`, which returns a cudaError_t.
#pragma once

#include "combine.cuh"
#include "logits_gradient.cuh"
#include "row_statistics.cuh"

namespace dppo {

constexpr int64_t kMaxBlocks = 0x7fffffff;

inline bool is_dtype(int dtype) { return dtype == DPPO_FLOAT32 || dtype == DPPO_BFLOAT16; }

inline bool is_grid(int64_t num_rows) { return num_rows >= 0 && num_rows <= kMaxBlocks; }

inline bool is_within(int value, int last) { return value >= 0 && value <= last; }

inline bool is_rule(int rule) {
  return rule == DPPO_RULE_NONE || rule == DPPO_RULE_RATIO || rule == DPPO_RULE_DIVERGENCE ||
         rule == DPPO_RULE_NEGATIVE;
}

inline bool is_divergence(int divergence) {
  return divergence == DPPO_BINARY_TV || divergence == DPPO_BINARY_KL || divergence == DPPO_TOPK_TV ||
         divergence == DPPO_TOPK_KL;
}

inline bool is_relax(int relax) {
  return relax == DPPO_RELAX_NONE || relax == DPPO_RELAX_HIGH || relax == DPPO_RELAX_LOW ||
         relax == DPPO_RELAX_BOTH;
}

inline bool is_flags(int flags) { return (flags & ~(DPPO_INCLUDE_OTHER | DPPO_REPLACE)) == 0; }

inline bool is_objective(const DppoObjective& objective, int top_k) {
  const bool has_other = (objective.flags & DPPO_INCLUDE_OTHER) != 0;
  return is_rule(objective.rule) && is_divergence(objective.divergence) && is_relax(objective.relax) &&
         is_flags(objective.flags) && (top_k > 0 || !is_topk(objective)) &&
         (has_other || objective.divergence != DPPO_TOPK_KL);
}

inline int64_t row_bytes(int columns, int dtype) {
  return static_cast<int64_t>(columns) * (dtype == DPPO_FLOAT32 ? sizeof(float) : sizeof(__nv_bfloat16));
}

// The instance of a kernel template for a dtype, with or without entropy.
template <typename Kernel>
inline Kernel instance(int dtype, int with_entropy, Kernel of_float, Kernel of_float_entropy, Kernel of_bfloat16,
                       Kernel of_bfloat16_entropy) {
  if (dtype == DPPO_FLOAT32) return with_entropy ? of_float_entropy : of_float;
  return with_entropy ? of_bfloat16_entropy : of_bfloat16;
}

}  // namespace dppo

DPPO_API int dppo_abi_version(void) { return DPPO_ABI_VERSION; }

DPPO_API const char* dppo_error_string(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

DPPO_API int dppo_row_statistics(const void* logits, int dtype, int64_t num_rows, int64_t row_stride,
                                 int num_columns, int vocab_start, const int64_t* targets,
                                 const int32_t* topk_ids, int top_k, const uint8_t* is_learning,
                                 float inverse_temperature, int with_entropy, float* statistics, void* stream) {
  using namespace dppo;
  if (!is_grid(num_rows) || !is_dtype(dtype) || num_columns < 0 || !is_within(top_k, DPPO_MAX_TOP_K) ||
      !(inverse_temperature > 0.f)) {
    return cudaErrorInvalidValue;
  }
  if (num_rows == 0) return cudaSuccess;
  if ((logits == nullptr && num_columns > 0) || targets == nullptr || (topk_ids == nullptr && top_k > 0) ||
      statistics == nullptr) {
    return cudaErrorInvalidValue;
  }
  const RowStatisticsArguments arguments{logits, row_stride, num_columns, vocab_start,
                                         targets, topk_ids, top_k, is_learning,
                                         inverse_temperature * kLog2E, statistics};
  const auto kernel =
      instance(dtype, with_entropy, row_statistics<float, false>, row_statistics<float, true>,
               row_statistics<__nv_bfloat16, false>, row_statistics<__nv_bfloat16, true>);
  return launch(kernel, num_rows, threads_per_row(row_bytes(num_columns, dtype)), stream, arguments);
}

DPPO_API int dppo_combine(const float* statistics, int num_shards, int64_t num_rows, int top_k,
                          const int64_t* targets, const int32_t* topk_ids, const float* rollout_log_probs,
                          const float* topk_rollout_log_probs, const float* anchor_log_probs,
                          const float* advantages, const uint8_t* is_learning, const float* token_weights,
                          const DppoObjective* objective, float* rows, float* topk_log_probs, void* stream) {
  using namespace dppo;
  if (!is_grid(num_rows) || num_shards < 1 || !is_within(top_k, DPPO_MAX_TOP_K) || objective == nullptr ||
      !is_objective(*objective, top_k)) {
    return cudaErrorInvalidValue;
  }
  if (num_rows == 0) return cudaSuccess;
  if (statistics == nullptr || targets == nullptr || (topk_ids == nullptr && top_k > 0) ||
      rollout_log_probs == nullptr || (topk_rollout_log_probs == nullptr && is_topk(*objective)) ||
      advantages == nullptr || rows == nullptr) {
    return cudaErrorInvalidValue;
  }
  const CombineArguments arguments{statistics, num_shards, num_rows, top_k, targets, topk_ids,
                                   rollout_log_probs, topk_rollout_log_probs, anchor_log_probs, advantages,
                                   is_learning, token_weights, *objective, rows, topk_log_probs};
  const int64_t num_blocks = (num_rows + kTokensPerBlock - 1) / kTokensPerBlock;
  return launch(combine, num_blocks, kTokensPerBlock * kWarpSize, stream, arguments);
}

DPPO_API int dppo_logits_gradient(const void* logits, void* gradient, int dtype, int64_t num_rows,
                                  int64_t row_stride, int64_t gradient_stride, int num_columns, int width,
                                  int vocab_start, const int64_t* targets, const float* rows,
                                  int64_t rows_stride, const int64_t* sources, float inverse_temperature,
                                  int with_entropy, const float* upstream, void* stream) {
  using namespace dppo;
  if (!is_grid(num_rows) || !is_dtype(dtype) || num_columns < 0 || width < num_columns ||
      !(inverse_temperature > 0.f)) {
    return cudaErrorInvalidValue;
  }
  if (num_rows == 0 || width == 0) return cudaSuccess;
  if (logits == nullptr || gradient == nullptr || targets == nullptr || rows == nullptr) {
    return cudaErrorInvalidValue;
  }
  const LogitsGradientArguments arguments{logits, gradient, row_stride, gradient_stride, num_columns,
                                          width, vocab_start, targets, rows, rows_stride,
                                          sources, inverse_temperature, upstream};
  const auto kernel =
      instance(dtype, with_entropy, logits_gradient<float, false>, logits_gradient<float, true>,
               logits_gradient<__nv_bfloat16, false>, logits_gradient<__nv_bfloat16, true>);
  return launch(kernel, num_rows, threads_per_row(row_bytes(width, dtype)), stream, arguments);
}
