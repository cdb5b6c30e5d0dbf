// The product of bf16 rows with a bf16 weight by wgmma, for any number of rows, on sm_90a: the
// weight's rows are those of A, 64 to a warpgroup, the rows of x the columns of B. So few rows cost
// what few columns cost, and the weight streams.
//
// A warp copies stages of 64 of K, of the weight and of x, to a ring in shared memory, by the
// tensor memory accelerator; warpgroups multiply them. A block goes through its tiles one after
// another, and what copies is ahead of what multiplies across tiles. wgmma_shapes.h says how K is
// cut and which form is taken. Where blocks share a tile, each writes the sums of its splits, and
// the last one to come adds all of them up, in their order.
#include "kernels/cuda/linear/wgmma_product.h"
#include "kernels/cuda/tensor_copies.cuh"

namespace llmserve::cuda {
namespace {

constexpr int kGroupThreads = 128;
constexpr int kGroupRows = kWgmmaGroupRows;
constexpr int kGroupBytes = kGroupRows * 128;  // of a stage
constexpr int kDepth = kWgmmaDepth;
constexpr int kBarrier = 1;  // of a warpgroup by itself, and the next number of the next
// Tiles of rows that come one after another for a tile of the weight: x of that many stays in the
// L2 (50 MB) beside what else is read.
constexpr int kRowTilesAtOnce = 16;
// Of 168 that each of 384 threads begins with: sums of a split and their total are 128.
constexpr int kCopyRegisters = 56;
constexpr int kSumRegisters = 224;

template <int kGroups, int kColumns>
struct Form {
  static constexpr WgmmaForm kIs{kGroups, kColumns, 1};
  static constexpr int kStages = kIs.stages();
  static constexpr int kStageBytes = kIs.stage_bytes();
  static constexpr int kThreads = kIs.threads();
  static constexpr int kBlocks = kIs.blocks_per_sm();
  static constexpr int kValues = kColumns / 2;  // of a thread
  static constexpr bool kTradesRegisters = kIs.trades_registers();
  static_assert(kStageBytes % 1024 == 0 && kIs.shared_bytes() <= 227 * 1024);
};

// What a kernel needs of a product, in stages, tiles and splits.
struct Work {
  const float* bias;
  Rows out;
  uint16_t* rounded;
  float* partials;
  int32_t* arrivals;
  int64_t num_outputs;  // columns of out
  int num_rows;
  int num_steps;    // of K
  int split_steps;  // of a split but the last
  int num_splits;
  int sharing;
  int row_tiles;
  int output_tiles;
  int num_tasks;
  bool accumulate;
  Activation activation;
};

__device__ __forceinline__ int lesser(int a, int b) { return a < b ? a : b; }

// One tile's splits that a block has.
struct Task {
  int tile;
  int output_tile;
  int row_tile;
  int first_split;
  int end_split;
};
__device__ __forceinline__ Task find_task(const Work& w, int number) {
  const int tile = number / w.sharing;
  const int each = w.num_splits / w.sharing;
  const int first_split = number % w.sharing * each;
  const int first_row_tile = tile / (kRowTilesAtOnce * w.output_tiles) * kRowTilesAtOnce;
  const int row_tiles = lesser(kRowTilesAtOnce, w.row_tiles - first_row_tile);
  const int in_batch = tile - first_row_tile * w.output_tiles;
  return {tile, in_batch / row_tiles, first_row_tile + in_batch % row_tiles, first_split,
          first_split + each};
}

// The stages of a block, one after another.
struct Walk {
  int number;
  Task task;
  int step;
  int end;

  __device__ __forceinline__ void start(const Work& w, int task_number) {
    number = task_number;
    if (number >= w.num_tasks) return;
    task = find_task(w, number);
    step = task.first_split * w.split_steps;
    end = lesser(task.end_split * w.split_steps, w.num_steps);
  }
  __device__ __forceinline__ bool is_there(const Work& w) const { return number < w.num_tasks; }
  __device__ __forceinline__ void advance(const Work& w) {
    if (++step == end) start(w, number + static_cast<int>(gridDim.x));
  }
};

template <int kStages>
struct Phases {
  uint64_t full[kStages];   // what was asked for is there
  uint64_t empty[kStages];  // all warps that read it have
};

// The warp that copies. What it brings of the weight before the wait, nobody writes.
template <class F, int kGroups, int kColumns, bool kIsGated>
__device__ __forceinline__ void bring(const CUtensorMap* weight, const CUtensorMap* x,
                                      const Work& w, std::byte* stages,
                                      Phases<F::kStages>& phases) {
  if constexpr (F::kTradesRegisters) give_registers<kCopyRegisters>();
  if (threadIdx.x != kGroups * kGroupThreads) {  // one thread asks for all
    // Not the lanes beside it: a warp that waits here asks for nothing, and the block lasts as long
    // as that thread, which waits.
    if (threadIdx.x / 32 != kGroups * kGroupThreads / 32) wait_for_previous();
    return;
  }
  const auto bring_weight = [&](const Walk& walk, int slot) {
    arrive_with_bytes(&phases.full[slot], F::kStageBytes);
    std::byte* to = stages + slot * F::kStageBytes;
    const int column = walk.step * kDepth;
    if constexpr (kIsGated)
      copy_box(to, weight, &phases.full[slot], column, 0, 0,
               walk.task.output_tile * (kGroups * kGroupRows / 16));
    else
      copy_box(to, weight, &phases.full[slot], column,
               walk.task.output_tile * (kGroups * kGroupRows));
  };
  const auto bring_x = [&](const Walk& walk, int slot) {
    copy_box(stages + slot * F::kStageBytes + kGroups * kGroupBytes, x, &phases.full[slot],
             walk.step * kDepth, walk.task.row_tile * kColumns);
  };
  Walk walk;
  walk.start(w, static_cast<int>(blockIdx.x));
  Walk behind = walk;
  int fill = 0;
  for (; fill < F::kStages && walk.is_there(w); ++fill, walk.advance(w)) bring_weight(walk, fill);
  wait_for_previous();
  for (int i = 0; i < fill; ++i, behind.advance(w)) bring_x(behind, i);
  for (; walk.is_there(w); ++fill, walk.advance(w)) {
    const int slot = fill % F::kStages;
    await_phase(&phases.empty[slot], (fill / F::kStages + 1) % 2);
    bring_weight(walk, slot);
    bring_x(walk, slot);
  }
}

// Sums of a split, a float4 for each eight columns. What another block wrote is in the L2.
__device__ __forceinline__ float4* partial_at(const Work& w, int tile, int split, int groups,
                                              int group, int eights) {
  const int64_t place = (int64_t{tile} * w.num_splits + split) * groups + group;
  return reinterpret_cast<float4*>(w.partials) + place * eights * kGroupThreads +
         threadIdx.x % kGroupThreads;
}
__device__ __forceinline__ float4 load_from_l2(const float4* from) {
#ifdef __CUDACC__
  return __ldcg(from);
#else
  return *from;
#endif
}

// Whether this block is the last one of those that share the tile; all have then written.
__device__ __forceinline__ bool comes_last(const Work& w, int* arrivals, int group,
                                           volatile bool* is_last) {
  __threadfence();
  meet_some(kBarrier + group, kGroupThreads);
  if (threadIdx.x % kGroupThreads == 0) {
    __threadfence();  // which those that it has met are part of
    *is_last = atomicAdd(arrivals, 1) == w.sharing - 1;
    if (*is_last) *arrivals = 0;  // for the next product
  }
  meet_some(kBarrier + group, kGroupThreads);
  const bool comes = *is_last;
  __threadfence();
  return comes;
}

// A thread's outputs of a tile: of row `output` of the weight, and eight further on, for two rows
// of x in each eight columns.
template <int kGroups, int kColumns, bool kIsGated>
__device__ __forceinline__ void write(const Work& w, const Task& task, int group,
                                      const float (&sums)[kColumns / 2]) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x % kGroupThreads / 32;
  const int sixteenth = (task.output_tile * kGroups + group) * (kGroupRows / 16) + warp;
  const int first_row = task.row_tile * kColumns + lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < (kIsGated ? 1 : 2); ++half) {
    const int64_t output = kIsGated ? int64_t{sixteenth} * 8 + lane / 4
                                    : int64_t{sixteenth} * 16 + half * 8 + lane / 4;
    if (output >= w.num_outputs) continue;
    const float bias = w.bias ? w.bias[output] : 0.0f;
    const float up_bias = kIsGated && w.bias ? w.bias[w.num_outputs + output] : 0.0f;
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      const int row = first_row + i / 2 * 8 + i % 2;
      if (row >= w.num_rows) break;
      float value = sums[i / 2 * 4 + half * 2 + i % 2];
      if (w.bias) value += bias;
      if constexpr (kIsGated) {
        float up = sums[i / 2 * 4 + 2 + i % 2];
        if (w.bias) up += up_bias;
        value = v_gate(w.activation, value, up);
        if (w.rounded) {
          w.rounded[row * w.num_outputs + output] = float_to_bf16(value);
          continue;
        }
      }
      float& out = w.out.data[row * w.out.stride + output];
      out = w.accumulate ? value + out : value;
    }
  }
}

// A warpgroup that multiplies.
template <class F, int kGroups, int kColumns, bool kIsGated>
__device__ __forceinline__ void compute(const Work& w, std::byte* stages,
                                        Phases<F::kStages>& phases, volatile bool* is_last) {
  if constexpr (F::kTradesRegisters) take_registers<kSumRegisters>();
  const int group = static_cast<int>(threadIdx.x) / kGroupThreads;
  const uint32_t address = shared_address(stages);
  const auto release = [&](int fill) {
    if (threadIdx.x % 32 == 0) arrive(&phases.empty[fill % F::kStages]);
  };
  wait_for_previous();
  float sums[F::kValues];
  float total[F::kValues];
#pragma unroll
  for (int i = 0; i < F::kValues; ++i) sums[i] = total[i] = 0.0f;
  int fill = 0;
  for (int number = static_cast<int>(blockIdx.x); number < w.num_tasks;
       number += static_cast<int>(gridDim.x)) {
    const Task task = find_task(w, number);
    for (int split = task.first_split; split < task.end_split; ++split) {
      const int steps = lesser(w.split_steps, w.num_steps - split * w.split_steps);
      pin(sums);
      for (int step = 0; step < steps; ++step, ++fill) {
        const int slot = fill % F::kStages;
        await_phase(&phases.full[slot], fill / F::kStages % 2);
        const uint32_t stage = address + slot * F::kStageBytes;
        const uint64_t a = describe(stage + group * kGroupBytes, 16);
        const uint64_t b = describe(stage + kGroups * kGroupBytes, 16);
        settle_registers();
#pragma unroll
        for (int i = 0; i < kDepth / 16; ++i)
          multiply_rows(sums, advance(a, i * 32), advance(b, i * 32), step > 0 || i > 0);
        commit_products();
        if (step == 0) continue;
        wait_for_products<1>();
        release(fill - 1);
      }
      wait_for_products<0>();
      pin(sums);
      release(fill - 1);
      if (w.sharing == 1) {
#pragma unroll
        for (int i = 0; i < F::kValues; ++i) total[i] = split == 0 ? sums[i] : total[i] + sums[i];
        continue;
      }
      float4* to = partial_at(w, task.tile, split, kGroups, group, kColumns / 8);
#pragma unroll
      for (int i = 0; i < kColumns / 8; ++i) {
        to[i * kGroupThreads] =
            float4{sums[i * 4], sums[i * 4 + 1], sums[i * 4 + 2], sums[i * 4 + 3]};
      }
    }
    if (w.sharing > 1) {
      if (!comes_last(w, w.arrivals + task.tile * kGroups + group, group, is_last + group))
        continue;
      for (int split = 0; split < w.num_splits; ++split) {
        const float4* from = partial_at(w, task.tile, split, kGroups, group, kColumns / 8);
#pragma unroll
        for (int i = 0; i < kColumns / 8; ++i) {
          const float4 part = load_from_l2(from + i * kGroupThreads);
          float* to = total + i * 4;
          to[0] = split == 0 ? part.x : to[0] + part.x;
          to[1] = split == 0 ? part.y : to[1] + part.y;
          to[2] = split == 0 ? part.z : to[2] + part.z;
          to[3] = split == 0 ? part.w : to[3] + part.w;
        }
      }
    }
    write<kGroups, kColumns, kIsGated>(w, task, group, total);
  }
}

// Blocks take tasks by turns. Shared memory: the stages, from a multiple of 1,024 bytes on.
template <int kGroups, int kColumns, bool kIsGated>
__global__ void __launch_bounds__(Form<kGroups, kColumns>::kThreads,
                                  Form<kGroups, kColumns>::kBlocks)
    wgmma_product_kernel(const LLMSERVE_GRID_CONSTANT CUtensorMap weight,
                         const LLMSERVE_GRID_CONSTANT CUtensorMap x, Work w) {
  using F = Form<kGroups, kColumns>;
  LLMSERVE_DYNAMIC_SHARED(std::byte, shared);
  __shared__ Phases<F::kStages> phases;
  __shared__ bool is_last[kGroups];
  std::byte* stages = shared + (1024 - shared_address(shared) % 1024) % 1024;
  if (threadIdx.x == 0) {
    for (int i = 0; i < F::kStages; ++i) {
      init_phases(&phases.full[i], 1);
      init_phases(&phases.empty[i], kGroups * kGroupThreads / 32);
    }
    show_phases();
  }
  __syncthreads();
  if (threadIdx.x >= kGroups * kGroupThreads)
    bring<F, kGroups, kColumns, kIsGated>(&weight, &x, w, stages, phases);
  else
    compute<F, kGroups, kColumns, kIsGated>(w, stages, phases, is_last);
}

template <int kGroups, int kColumns, bool kIsGated>
void prepare() {
  check("cudaFuncSetAttribute of linear",
        cudaFuncSetAttribute(
            reinterpret_cast<const void*>(wgmma_product_kernel<kGroups, kColumns, kIsGated>),
            cudaFuncAttributeMaxDynamicSharedMemorySize,
            static_cast<int>(Form<kGroups, kColumns>::kIs.shared_bytes())));
}

template <int kGroups, int kColumns, bool kIsGated>
void run(const WgmmaProduct& p, const Work& w, int num_sms, cudaStream_t stream) {
  using F = Form<kGroups, kColumns>;
  launch_early("linear", wgmma_product_kernel<kGroups, kColumns, kIsGated>,
               blocks(std::min(w.num_tasks, num_sms * F::kBlocks)), F::kThreads,
               static_cast<size_t>(F::kIs.shared_bytes()), stream, p.weight, p.x, w);
}

// Every form that wgmma_form() gives.
#define LLMSERVE_FORMS(form) \
  form(1, 8) form(1, 16) form(1, 32) form(1, 64) form(2, 32) form(2, 64) form(2, 128)

}  // namespace

void prepare_wgmma_product() {
#define LLMSERVE_FORM(groups, columns) \
  prepare<groups, columns, false>();   \
  prepare<groups, columns, true>();
  LLMSERVE_FORMS(LLMSERVE_FORM)
#undef LLMSERVE_FORM
}

void run_wgmma_product(const WgmmaProduct& p, int num_sms, cudaStream_t stream) {
  if (p.num_rows == 0 || p.out_features == 0) return;
  const WgmmaForm& form = p.form;
  const Work w{.bias = p.bias,
               .out = p.out,
               .rounded = p.rounded,
               .partials = p.partials,
               .arrivals = p.arrivals,
               .num_outputs = p.is_gated ? p.out_features / 2 : p.out_features,
               .num_rows = static_cast<int>(p.num_rows),
               .num_steps = static_cast<int>(ceil_div(p.in_features, kDepth)),
               .split_steps = wgmma_split_steps(p.in_features),
               .num_splits = wgmma_splits(p.in_features),
               .sharing = form.sharing,
               .row_tiles = static_cast<int>(form.row_tiles(p.num_rows)),
               .output_tiles = static_cast<int>(form.output_tiles(p.out_features)),
               .num_tasks = static_cast<int>(form.tiles(p.num_rows, p.out_features) * form.sharing),
               .accumulate = p.accumulate,
               .activation = p.activation};
#define LLMSERVE_FORM(groups_, columns_)                                    \
  if (form.groups == groups_ && form.columns == columns_)                   \
    return p.is_gated ? run<groups_, columns_, true>(p, w, num_sms, stream) \
                      : run<groups_, columns_, false>(p, w, num_sms, stream);
  LLMSERVE_FORMS(LLMSERVE_FORM)
#undef LLMSERVE_FORM
}

}  // namespace llmserve::cuda
