/* The C interface of the fused trust-region loss, the same for the CUDA build and for the host build.
 *
 * Every pointer is device memory (host memory in the host build) unless noted otherwise, every array is contiguous
 * and row-major, and nothing synchronises. Functions return a cudaError_t as int, 0 for success. `stream` is a
 * cudaStream_t; the host build ignores it. num_rows = 0 succeeds and launches nothing.
 *
 * Order of use, for N tokens and tensor-parallel ranks that hold V/tp columns each: dppo_row_statistics on every
 * rank; one all-gather of its [N, 4 + K]; dppo_combine on every rank, which gets the same bits everywhere;
 * dppo_logits_gradient on every rank.
 */
#pragma once

#include <stdint.h>

#define DPPO_ABI_VERSION 1
#define DPPO_MAX_TOP_K 64

#if defined(__cplusplus)
#define DPPO_API extern "C" __attribute__((visibility("default")))
#else
#define DPPO_API
#endif

/* Python defines each of these numbers with its rule or divergence, and a test compares both. */
enum DppoDtype { DPPO_FLOAT32 = 0, DPPO_BFLOAT16 = 1 };
enum DppoRule { DPPO_RULE_NONE = 0, DPPO_RULE_RATIO = 1, DPPO_RULE_DIVERGENCE = 2, DPPO_RULE_NEGATIVE = 3 };
enum DppoDivergence { DPPO_BINARY_TV = 0, DPPO_BINARY_KL = 1, DPPO_TOPK_TV = 2, DPPO_TOPK_KL = 3 };
enum DppoRelax { DPPO_RELAX_NONE = 0, DPPO_RELAX_HIGH = 1, DPPO_RELAX_LOW = 2, DPPO_RELAX_BOTH = 3 };
enum DppoFlag { DPPO_INCLUDE_OTHER = 1, DPPO_REPLACE = 2 };

/* Fields as in algorithms/objective.py; thresholds that the rule does not read may have any value. */
typedef struct {
  int rule;       /* DppoRule */
  int divergence; /* DppoDivergence */
  int relax;      /* DppoRelax */
  int flags;      /* DppoFlag, or-ed */
  float delta_low, delta_high;
  float eps_low, eps_high;
  float log_alpha; /* -inf for alpha = 0 */
  float ratio_cap; /* inf for none */
  float entropy_coef;
} DppoObjective;

/* Results of dppo_combine for each token: planes of its [DPPO_NUM_ROWS, N] result. */
enum DppoRow {
  DPPO_LOG_PROBS = 0,         /* log pi(target), not clamped */
  DPPO_ENTROPY = 1,           /* nats; meaningless if the statistics were taken without entropy */
  DPPO_DIVERGENCE = 2,        /* from the anchor */
  DPPO_RATIO = 3,             /* pi/mu, uncapped */
  DPPO_WEIGHT = 4,            /* 1 if the token learns */
  DPPO_COEFFICIENT = 5,       /* M min(r, C) A, without weights */
  DPPO_LOSS = 6,              /* with weights, entropy bonus included */
  DPPO_LOG_PROB_GRADIENT = 7, /* d loss / d log_prob */
  DPPO_ENTROPY_GRADIENT = 8,  /* d loss / d entropy */
  DPPO_HIGHEST = 9,           /* the largest y of the row, see dppo_row_statistics */
  DPPO_LOG2_SUM = 10,         /* log2 of the sum of 2^(y - highest) */
  DPPO_NUM_ROWS = 11
};

DPPO_API int dppo_abi_version(void);

/* "cuda" or "cpu": the memory that the pointers below must be in. */
DPPO_API const char* dppo_device_type(void);

DPPO_API const char* dppo_error_string(int error);

/* statistics[i] = {m, s, w, y(target), y(id_1) .. y(id_K)} over the columns of this shard, where
 * y = logit * inverse_temperature * log2(e), m = max y, s = sum 2^(y - m), w = sum 2^(y - m) (y - m) (0 without
 * with_entropy). Tokens of other shards and ids of -1 give 0. Columns from num_columns on are padding and never
 * read. Rows that do not learn are not read either: {-inf, 0 ...}, and so is a shard without columns. */
DPPO_API int dppo_row_statistics(
    const void* logits,         /* [num_rows, row_stride] */
    int dtype,                  /* DppoDtype */
    int64_t num_rows,
    int64_t row_stride,         /* elements; any, and so may be the base: vectors of 16 bytes start within the row */
    int num_columns,            /* of the shard that are tokens */
    int vocab_start,            /* global id of column 0 */
    const int64_t* targets,     /* [N] global ids */
    const int32_t* topk_ids,    /* [N, K] global ids, -1 pads; null for K = 0 */
    int top_k,                  /* K, 0 to DPPO_MAX_TOP_K */
    const uint8_t* is_learning, /* [N], null: all */
    float inverse_temperature,
    int with_entropy,
    float* statistics,          /* out: [N, 4 + K] */
    void* stream);

/* Merges the shards in rank order and computes each token's part of the loss. Rows that do not learn give ratio 1
 * and 0 in all other planes; their inputs are not used. cudaErrorInvalidValue if the objective has a number or a
 * flag that is in none of the enums above. */
DPPO_API int dppo_combine(
    const float* statistics,             /* [num_shards, N, 4 + K] */
    int num_shards,
    int64_t num_rows,
    int top_k,
    const int64_t* targets,              /* [N] */
    const int32_t* topk_ids,             /* [N, K], null for K = 0 */
    const float* rollout_log_probs,      /* [N] */
    const float* topk_rollout_log_probs, /* [N, K], read by Top-K divergences only */
    const float* anchor_log_probs,       /* [N], null: the rollout policy's */
    const float* advantages,             /* [N] */
    const uint8_t* is_learning,          /* [N], null: all */
    const float* token_weights,          /* [N], null: 1 */
    const DppoObjective* objective,      /* host memory */
    float* rows,                         /* out: [DPPO_NUM_ROWS, N] */
    float* topk_log_probs,               /* out: [N, K], -inf for ids of -1 and in rows that do not learn; or null */
    void* stream);

/* gradient[i] = d (upstream * loss) / d logits[sources[i]] for this shard's columns; 0 in columns num_columns to
 * width. `gradient` may be `logits`, also with `sources`: then a row that is written must be its own source, or the
 * source of no row. Rows without gradient are written, never read. */
DPPO_API int dppo_logits_gradient(
    const void* logits,
    void* gradient,
    int dtype,
    int64_t num_rows,         /* of `gradient` */
    int64_t row_stride,       /* of `logits` */
    int64_t gradient_stride,
    int num_columns,
    int width,                /* of `gradient`, padding included */
    int vocab_start,
    const int64_t* targets,   /* by source row */
    const float* rows,        /* of dppo_combine, by source row */
    int64_t rows_stride,      /* from plane to plane of `rows` */
    const int64_t* sources,   /* [num_rows], null: row i is its own source */
    float inverse_temperature,
    int with_entropy,         /* 0: no entropy gradient, whatever `rows` holds */
    const float* upstream,    /* one number, null: 1 */
    void* stream);
