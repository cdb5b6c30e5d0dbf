// Rows that multiply with weights of their own (GroupedLinearArgs): how they are brought together
// on the device, without the host knowing which are whose.
#pragma once

#include "kernels/cuda/kernels.h"

namespace llmserve::cuda {

// Some rows of one weight, for the blocks of a product: `count` entries of RowGroups::order.
struct RowTask {
  int32_t weight;
  int32_t begin;
  int32_t count;
};

// Rows of out in the order of their weights, and what blocks have to do. A product's grid is as
// many blocks as there can be tasks; those that have none end.
struct RowGroups {
  const void* const* weights = nullptr;  // [X]
  int32_t* order = nullptr;              // [R]
  RowTask* tasks = nullptr;              // [max_row_tasks()]; null: not grouped
  int32_t* num_tasks = nullptr;
  int32_t rows_each = 1;  // of out, that read one row of x
  int64_t max_tasks = 0;
};

// Tasks of at most `rows_at_once` rows that R rows of X weights can come to.
constexpr int64_t max_row_tasks(int64_t rows, int64_t weights, int64_t rows_at_once) {
  return std::min(rows, weights + rows / rows_at_once);
}

// Fills order, tasks and num_tasks from weight_ids [R], of which negative ones have no place.
// counts [X] is working memory. Rows of a weight keep their order.
void group_rows(const int32_t* weight_ids, int64_t num_rows, int64_t num_weights,
                int64_t rows_at_once, int32_t* counts, const RowGroups& groups,
                cudaStream_t stream);

// As plain_linear and mma_linear, of the tasks' rows and weights: params.num_rows is R, its bias
// [X, N] or null. Tasks have at most kSmallTile.rows rows; or rows_at_once, kSmallMma.rows or
// kMediumMma.rows.
void grouped_plain_linear(const LinearParams& params, const RowGroups& groups, cudaStream_t stream);
void grouped_mma_linear(const uint16_t* x, const LinearParams& params, int64_t rows_at_once,
                        const RowGroups& groups, cudaStream_t stream);

}  // namespace llmserve::cuda
