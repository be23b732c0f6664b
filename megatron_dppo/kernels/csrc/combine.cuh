// Computes each token's loss, and the inputs of its gradient, from the statistics of all shards. One warp per token.
#pragma once

#include "divergences.cuh"
#include "trust_region.cuh"

namespace dppo {

constexpr int kTokensPerBlock = 4;

struct CombineArguments {
  const float* statistics;
  int num_shards;
  int64_t num_rows;
  int top_k;
  const int64_t* targets;
  const int32_t* topk_ids;
  const float* rollout_log_probs;
  const float* topk_rollout_log_probs;
  const float* anchor_log_probs;
  const float* advantages;
  const uint8_t* is_learning;
  const float* token_weights;
  DppoObjective objective;
  float* rows;
  float* topk_log_probs;
};

// A row's softmax over the whole vocabulary.
struct Softmax {
  float highest, log2_sum, entropy;

  __device__ __forceinline__ float log_prob(float y) const { return ((y - highest) - log2_sum) * kLn2; }
};

// One shard has the token's logit, the others 0.
__device__ __forceinline__ float sum_over_shards(const CombineArguments& in, int64_t row, int column) {
  const int width = 4 + in.top_k;
  float sum = 0.f;
  for (int shard = 0; shard < in.num_shards; ++shard) {
    sum += in.statistics[(shard * in.num_rows + row) * width + column];
  }
  return sum;
}

__device__ __forceinline__ Softmax merge_shards(const CombineArguments& in, int64_t row) {
  Statistics whole = no_statistics();
  for (int shard = 0; shard < in.num_shards; ++shard) {
    const float* part = in.statistics + (shard * in.num_rows + row) * (4 + in.top_k);
    whole = merge(whole, Statistics{part[0], part[1], part[2]});
  }
  const float log2_sum = log2f(whole.s);
  return Softmax{whole.m, log2_sum, (log2_sum - whole.w / whole.s) * kLn2};
}

__host__ __device__ __forceinline__ bool is_topk(const DppoObjective& objective) {
  return objective.divergence == DPPO_TOPK_TV || objective.divergence == DPPO_TOPK_KL;
}

// Log-probs of this lane's columns, also written out if requested; clamped if they are for a divergence.
__device__ __forceinline__ void load_columns(const CombineArguments& in, const Softmax& softmax, int64_t row,
                                             int lane, LaneColumns& columns, int* ids) {
#pragma unroll
  for (int i = 0; i < kColumnsPerLane; ++i) {
    const int k = i * kWarpSize + lane;
    const int64_t at = row * in.top_k + k;
    ids[i] = k < in.top_k ? in.topk_ids[at] : -1;
    columns.log_probs[i] = -INFINITY;
    columns.rollout_log_probs[i] = -INFINITY;
    if (ids[i] >= 0) {
      columns.log_probs[i] = softmax.log_prob(sum_over_shards(in, row, 4 + k));
      if (is_topk(in.objective)) columns.rollout_log_probs[i] = at_most(in.topk_rollout_log_probs[at], 0.f);
    }
    if (k < in.top_k && in.topk_log_probs != nullptr) in.topk_log_probs[at] = columns.log_probs[i];
    columns.log_probs[i] = at_most(columns.log_probs[i], 0.f);
  }
}

__device__ __forceinline__ float divergence_of(const CombineArguments& in, int64_t row, const Token& token,
                                               LaneColumns& columns, const int* ids, int lane) {
  const DppoObjective& objective = in.objective;
  switch (objective.divergence) {
    case DPPO_BINARY_TV:
      return tv_term(token.log_prob, token.anchor_log_prob);
    case DPPO_BINARY_KL:
      return binary_kl(token.log_prob, token.anchor_log_prob);
    case DPPO_TOPK_TV:
    case DPPO_TOPK_KL:
      keep_outcomes(columns, ids, in.targets[row], (objective.flags & DPPO_REPLACE) != 0, lane);
      return topk_divergence(columns, token.log_prob, token.rollout_log_prob,
                             objective.divergence == DPPO_TOPK_KL, (objective.flags & DPPO_INCLUDE_OTHER) != 0,
                             lane);
  }
  return NAN;  // dppo_combine refuses other numbers
}

__device__ __forceinline__ void write_idle_row(const CombineArguments& in, int64_t row, int lane) {
  for (int plane = lane; plane < DPPO_NUM_ROWS; plane += kWarpSize) {
    in.rows[plane * in.num_rows + row] = plane == DPPO_RATIO ? 1.f : 0.f;
  }
  if (in.topk_log_probs != nullptr) {
    for (int k = lane; k < in.top_k; k += kWarpSize) in.topk_log_probs[row * in.top_k + k] = -INFINITY;
  }
}

// The loss of algorithms/loss.py; `log_prob` is the one that is trained, not clamped.
__device__ __forceinline__ void write_row(const CombineArguments& in, int64_t row, const Softmax& softmax,
                                          float log_prob, const Token& token) {
  const DppoObjective& objective = in.objective;
  const float mask = is_dropped(objective, token) ? 0.f : 1.f;
  const float ratio = expf(token.log_prob - token.rollout_log_prob);
  const bool is_active = mask != 0.f && token.advantage != 0.f;
  const float coefficient = is_active ? at_most(ratio, objective.ratio_cap) * token.advantage : 0.f;
  const float weight = in.token_weights == nullptr ? 1.f : in.token_weights[row];
  const bool is_live = coefficient != 0.f && weight != 0.f;
  const bool has_bonus = objective.entropy_coef != 0.f && weight != 0.f;
  const float log_prob_gradient = is_live ? -(coefficient * weight) : 0.f;
  const float entropy_gradient = has_bonus ? -(objective.entropy_coef * weight) : 0.f;
  float loss = is_live ? log_prob_gradient * log_prob : 0.f;
  if (has_bonus) loss += entropy_gradient * softmax.entropy;

  float* out = in.rows + row;
  const int64_t plane = in.num_rows;
  out[DPPO_LOG_PROBS * plane] = log_prob;
  out[DPPO_ENTROPY * plane] = softmax.entropy;
  out[DPPO_DIVERGENCE * plane] = token.divergence;
  out[DPPO_RATIO * plane] = ratio;
  out[DPPO_WEIGHT * plane] = mask;
  out[DPPO_COEFFICIENT * plane] = coefficient;
  out[DPPO_LOSS * plane] = loss;
  out[DPPO_LOG_PROB_GRADIENT * plane] = log_prob_gradient;
  out[DPPO_ENTROPY_GRADIENT * plane] = entropy_gradient;
  out[DPPO_HIGHEST * plane] = softmax.highest;
  out[DPPO_LOG2_SUM * plane] = softmax.log2_sum;
}

// All lanes of a warp return early, or none: its lanes exchange values. Eight resident blocks leave a thread 64
// registers, so that nothing spills.
__global__ void __launch_bounds__(kTokensPerBlock * kWarpSize, 8) combine(const CombineArguments in) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kTokensPerBlock + threadIdx.x / kWarpSize;
  if (row >= in.num_rows) return;
  if (in.is_learning != nullptr && in.is_learning[row] == 0) {
    write_idle_row(in, row, lane);
    return;
  }
  const Softmax softmax = merge_shards(in, row);
  LaneColumns columns;
  int ids[kColumnsPerLane];
  load_columns(in, softmax, row, lane, columns, ids);

  const float log_prob = softmax.log_prob(sum_over_shards(in, row, 3));
  Token token;
  token.log_prob = at_most(log_prob, 0.f);
  token.rollout_log_prob = at_most(in.rollout_log_probs[row], 0.f);
  token.anchor_log_prob = token.rollout_log_prob;
  if (in.anchor_log_probs != nullptr) token.anchor_log_prob = at_most(in.anchor_log_probs[row], 0.f);
  token.advantage = in.advantages[row];
  token.divergence = divergence_of(in, row, token, columns, ids, lane);
  if (lane == 0) write_row(in, row, softmax, log_prob, token);
}

}  // namespace dppo
