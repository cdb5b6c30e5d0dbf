// What stands between two steps on the device: tokens that go from one to the next, and results
// that the host polls.
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launch_math.h"

namespace llmserve::cuda {
namespace {

constexpr int kThreads = 256;

// Thread t of [0, T) in steps of the grid.
__global__ void take_awaited_kernel(const DrawnRow* drawn, const int32_t* awaited_rows, int64_t n,
                                    int32_t* token_ids) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; t < n; t += stride)
    if (awaited_rows[t] >= 0) token_ids[t] = drawn[awaited_rows[t]].token_id;
}

// Row s of [0, S') in steps of the grid.
__global__ void make_draw_rows_kernel(const StepHeader* header, int64_t first_row,
                                      const SeededDraw* draws, ConstRows logits, int64_t n,
                                      DrawRow* rows) {
  wait_for_previous();
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t s = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; s < n;
       s += stride) {
    const SeededDraw& from = draws[s];
    DrawRow row{};
    row.raw = first_row + s < header->num_rows ? logits.data + s * logits.stride : nullptr;
    row.draw = from.draw;
    row.seed = from.seed;
    row.position = from.position;
    row.forced_token_id = -1;
    rows[s] = row;
  }
}

// One block: all rows are written before the number is, as the host sees it.
__global__ void publish_kernel(const StepHeader* header, const DrawnRow* drawn,
                               unsigned char* results, int64_t rows_begin) {
  wait_for_previous();
  unsigned char* to = results + header->result_begin;
  DrawnRow* rows = reinterpret_cast<DrawnRow*>(to + rows_begin);
  for (int64_t s = threadIdx.x; s < header->num_rows; s += blockDim.x) rows[s] = drawn[s];
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) store_release(reinterpret_cast<int64_t*>(to), header->step);
}

}  // namespace

bool kernels_wait() {
  cudaFuncAttributes attributes{};
  check("cudaFuncGetAttributes",
        cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(publish_kernel)));
  return attributes.ptxVersion >= 90;
}

void take_awaited(const DrawnRow* drawn, const int32_t* awaited_rows, int64_t num_tokens,
                  int32_t* token_ids, cudaStream_t stream) {
  if (num_tokens == 0) return;
  launch("take_awaited", take_awaited_kernel, blocks(elementwise_blocks(num_tokens, kThreads)),
         kThreads, 0, stream, drawn, awaited_rows, num_tokens, token_ids);
}

void make_draw_rows(const StepHeader* header, int64_t first_row, const SeededDraw* draws,
                    ConstRows logits, int64_t num_rows, DrawRow* rows, cudaStream_t stream) {
  if (num_rows == 0) return;
  launch_early("make_draw_rows", make_draw_rows_kernel,
               blocks(elementwise_blocks(num_rows, kThreads)), kThreads, 0, stream, header,
               first_row, draws, logits, num_rows, rows);
}

void publish(const StepHeader* header, const DrawnRow* drawn, void* results, int64_t rows_begin,
             cudaStream_t stream) {
  launch_early("publish", publish_kernel, dim3(1), kThreads, 0, stream, header, drawn,
               static_cast<unsigned char*>(results), rows_begin);
}

}  // namespace llmserve::cuda
