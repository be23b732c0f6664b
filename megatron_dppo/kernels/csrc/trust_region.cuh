// The rules of algorithms/rules.py: which tokens they drop. Log-probs are at most 0.
#pragma once

#include "common.cuh"

namespace dppo {

struct Token {
  float log_prob;
  float anchor_log_prob;   // of the policy that the rules compare with
  float rollout_log_prob;
  float advantage;
  float divergence;
};

__device__ __forceinline__ bool is_dropped_by_ratio(const DppoObjective& objective, const Token& token) {
  const float ratio = expf(token.log_prob - token.anchor_log_prob);
  const bool is_rare = token.rollout_log_prob < objective.log_alpha;
  const int relax = objective.relax;
  const bool is_high_lifted = is_rare && (relax == DPPO_RELAX_HIGH || relax == DPPO_RELAX_BOTH);
  const bool is_low_lifted = is_rare && (relax == DPPO_RELAX_LOW || relax == DPPO_RELAX_BOTH);
  const bool is_above = ratio > 1.f + objective.eps_high && !is_high_lifted;
  const bool is_below = ratio < 1.f - objective.eps_low && !is_low_lifted;
  return (token.advantage > 0.f && is_above) || (token.advantage < 0.f && is_below);
}

__device__ __forceinline__ bool is_dropped_by_divergence(const DppoObjective& objective, const Token& token) {
  const bool is_above = token.log_prob > token.anchor_log_prob;
  const bool is_below = token.log_prob < token.anchor_log_prob;
  return (token.advantage > 0.f && is_above && token.divergence > objective.delta_high) ||
         (token.advantage < 0.f && is_below && token.divergence > objective.delta_low);
}

__device__ __forceinline__ bool is_bad_negative(const DppoObjective& objective, const Token& token) {
  return token.advantage < 0.f && expf(token.anchor_log_prob) - expf(token.log_prob) >= objective.delta_low;
}

__device__ __forceinline__ bool is_dropped(const DppoObjective& objective, const Token& token) {
  switch (objective.rule) {
    case DPPO_RULE_NONE:
      return false;
    case DPPO_RULE_RATIO:
      return is_dropped_by_ratio(objective, token);
    case DPPO_RULE_DIVERGENCE:
      return is_dropped_by_divergence(objective, token);
    case DPPO_RULE_NEGATIVE:
      return is_bad_negative(objective, token);
  }
  return true;  // dppo_combine refuses other numbers
}

}  // namespace dppo
