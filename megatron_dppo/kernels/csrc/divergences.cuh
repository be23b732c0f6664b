// Divergences of the policy from its anchor: the same terms as in algorithms/divergence.py, in float32.
// Every variable named log_prob is at most 0.
#pragma once

#include "common.cuh"

namespace dppo {

constexpr int kColumnsPerLane = DPPO_MAX_TOP_K / kWarpSize;
// Logarithms of ROUNDOFF_EPSILONS of float32, 32 * 2^-23, and of SURELY_POSITIVE_TAIL, 0.01.
constexpr float kLogRoundoff = -18.f * kLn2;
constexpr float kLogSurelyPositiveTail = -4.605170185988092f;

// The Top-K columns of one lane, k = lane and lane + 32; -inf for columns that are no outcome.
struct LaneColumns {
  float log_probs[kColumnsPerLane];
  float rollout_log_probs[kColumnsPerLane];
};

// log(1 - p) from log p: -inf at p = 1, 0 at p = 0.
__device__ __forceinline__ float log1mexp(float log_prob) {
  return log_prob > -kLn2 ? logf(-expm1f(log_prob)) : log1pf(-expf(log_prob));
}

// q log(q / p) of one outcome: 0 if q = 0, +inf if only p is 0.
__device__ __forceinline__ float kl_term(float log_prob, float anchor_log_prob) {
  const float anchor_prob = expf(anchor_log_prob);
  return anchor_prob > 0.f ? anchor_prob * (anchor_log_prob - log_prob) : 0.f;
}

__device__ __forceinline__ float tv_term(float log_prob, float anchor_log_prob) {
  return fabsf(expf(log_prob) - expf(anchor_log_prob));
}

// Logarithms of both tails without the noise of 1 - sum. If both are within roundoff, both are 0. If only the
// policy's is: 0 if the rollout's is certainly positive (a KL of +inf), else roundoff (the KL is a lower bound).
__device__ __forceinline__ void resolve_tails(float& log_tail, float& rollout_log_tail) {
  const bool is_unresolved = log_tail <= kLogRoundoff;
  const bool is_covered = is_unresolved && rollout_log_tail <= kLogRoundoff;
  const bool is_zero = is_covered || (is_unresolved && rollout_log_tail >= kLogSurelyPositiveTail);
  log_tail = is_zero ? -INFINITY : at_least(log_tail, kLogRoundoff);
  if (is_covered) rollout_log_tail = -INFINITY;
}

__device__ __forceinline__ float binary_kl(float log_prob, float anchor_log_prob) {
  float log_tail = log1mexp(log_prob);
  float anchor_log_tail = log1mexp(anchor_log_prob);
  resolve_tails(log_tail, anchor_log_tail);
  return at_least(kl_term(log_prob, anchor_log_prob) + kl_term(log_tail, anchor_log_tail), 0.f);
}

// Keeps the outcomes among a row's `columns`, with their ids in `ids` (-1 pads): not the sampled token, which is a
// separate outcome, and not the token that it replaces. All lanes of the warp must call this.
__device__ __forceinline__ void keep_outcomes(LaneColumns& columns, const int* ids, int64_t target, bool replace,
                                              int lane) {
  int last = -1;
  bool is_among = false;
#pragma unroll
  for (int i = 0; i < kColumnsPerLane; ++i) {
    if (ids[i] >= 0) last = i * kWarpSize + lane;
    is_among |= ids[i] >= 0 && ids[i] == target;
  }
  int replaced = -1;
  if (replace) {
    last = warp_max(last);
    replaced = warp_max(is_among) ? -1 : last;
  }
#pragma unroll
  for (int i = 0; i < kColumnsPerLane; ++i) {
    if (ids[i] < 0 || ids[i] == target || i * kWarpSize + lane == replaced) {
      columns.log_probs[i] = -INFINITY;
      columns.rollout_log_probs[i] = -INFINITY;
    }
  }
}

// log(1 - the sum of the outcomes' masses); the largest through expm1, so that 1 - 1e-9 leaves 1e-9.
__device__ __forceinline__ float log_tail_of(const float* log_masses, float sampled, int lane) {
  float largest = sampled;
  int column = DPPO_MAX_TOP_K;  // of the sampled token
#pragma unroll
  for (int i = 0; i < kColumnsPerLane; ++i) {
    if (log_masses[i] > largest) {
      largest = log_masses[i];
      column = i * kWarpSize + lane;
    }
  }
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    const float other = __shfl_xor_sync(kWholeWarp, largest, offset);
    const int other_column = __shfl_xor_sync(kWholeWarp, column, offset);
    if (other > largest || (other == largest && other_column < column)) {
      largest = other;
      column = other_column;
    }
  }
  float others = 0.f;
#pragma unroll
  for (int i = 0; i < kColumnsPerLane; ++i) {
    if (i * kWarpSize + lane != column) others += expf(log_masses[i]);
  }
  others = warp_sum(others);
  if (column != DPPO_MAX_TOP_K) others += expf(sampled);
  return logf(at_least(-expm1f(largest) - others, 0.f));
}

// Divergence over the columns' outcomes, the sampled token and, if requested, 'other'. A KL is at least the sampled
// token's binary KL, as topk_kl of algorithms/divergence.py explains. Every lane gets the result.
__device__ __forceinline__ float topk_divergence(const LaneColumns& columns, float log_prob,
                                                 float rollout_log_prob, bool is_kl, bool include_other,
                                                 int lane) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kColumnsPerLane; ++i) {
    const float p = columns.log_probs[i], q = columns.rollout_log_probs[i];
    sum += is_kl ? kl_term(p, q) : tv_term(p, q);
  }
  sum = warp_sum(sum) + (is_kl ? kl_term(log_prob, rollout_log_prob) : tv_term(log_prob, rollout_log_prob));
  if (include_other) {
    float log_tail = log_tail_of(columns.log_probs, log_prob, lane);
    float rollout_log_tail = log_tail_of(columns.rollout_log_probs, rollout_log_prob, lane);
    resolve_tails(log_tail, rollout_log_tail);
    sum += is_kl ? kl_term(log_tail, rollout_log_tail) : tv_term(log_tail, rollout_log_tail);
  }
  return is_kl ? at_least(sum, binary_kl(log_prob, rollout_log_prob)) : sum / 2.f;
}

}  // namespace dppo
