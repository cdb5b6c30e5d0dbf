// The CUDA backend's launch parameters, which are host functions, for tests without a GPU.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/stepped_scheduler.h"
#include "engine/recorded_shape.h"
#include "kernels/cuda/attention/column_plan.h"
#include "kernels/cuda/launch_math.h"
#include "kernels/cuda/linear/wgmma_shapes.h"
#include "kernels/cuda/steps/recorded_work.h"

namespace py = pybind11;

namespace llmserve {

void register_testing_cuda(py::module_& testing);

namespace {

// The keys that are new, or had given way, of a series of them.
std::vector<int> new_keys(const std::vector<int>& keys, size_t max_size) {
  cuda::RecordedWork<int, int> recorded(max_size);
  std::vector<int> found;
  for (const int key : keys) {
    auto& entry = recorded.find(key);
    if (!entry.has_run) found.push_back(key);
    entry.has_run = true;
  }
  return found;
}

}  // namespace

void register_testing_cuda(py::module_& testing) {
  using namespace py::literals;
  py::module_ math = testing.def_submodule("cuda_launch", "Launch parameters of the CUDA kernels.");
  math.attr("MAX_THREADS") = cuda::kMaxThreads;
  math.attr("MAX_GRID_X") = cuda::kMaxGridX;
  math.attr("MAX_GRID_YZ") = cuda::kMaxGridYZ;
  math.attr("MAX_SHARED_BYTES") = cuda::kMaxSharedBytes;
  math.def("row_threads", &cuda::row_threads, "width"_a, "max_threads"_a = 256);
  math.def("elementwise_blocks", &cuda::elementwise_blocks, "n"_a, "threads"_a);
  math.def(
      "gemm",
      [](int64_t rows, int64_t columns) {
        const cuda::GemmTile tile = cuda::gemm_tile(rows);
        return py::make_tuple(tile.rows, tile.columns, cuda::gemm_blocks_x(columns, tile),
                              cuda::gemm_blocks_y(rows, tile));
      },
      "rows"_a, "columns"_a, "(tile rows, tile columns, blocks x, blocks y)");
  math.def(
      "mma",
      [](int64_t rows, int64_t columns) {
        const cuda::MmaTile tile =
            std::array{cuda::kSmallMma, cuda::kMediumMma, cuda::kLargeMma}.at(
                static_cast<size_t>(cuda::mma_tile(rows, columns)));
        return py::make_tuple(tile.rows, tile.columns, tile.threads(), tile.shared_bytes(),
                              cuda::mma_blocks(rows, columns, tile));
      },
      "rows"_a, "columns"_a, "(tile rows, tile columns, threads, shared bytes, blocks)");
  math.def(
      "wgmma_splits",
      [](int64_t in_features) {
        return py::make_tuple(cuda::wgmma_splits(in_features),
                              cuda::wgmma_split_steps(in_features));
      },
      "in_features"_a, "(splits, stages of a split)");
  math.def(
      "wgmma_form",
      [](int64_t rows, int64_t outputs, int64_t in_features) {
        const cuda::WgmmaForm form = cuda::wgmma_form(rows, outputs, in_features);
        return py::make_tuple(form.groups, form.columns, form.sharing, form.tiles(rows, outputs),
                              form.tile_bytes(), form.stages(), form.shared_bytes(), form.threads(),
                              form.blocks_per_sm());
      },
      "rows"_a, "outputs"_a, "in_features"_a,
      "(warpgroups, columns, sharing, tiles, bytes of a tile's sums, stages, shared bytes, "
      "threads, "
      "blocks an SM)");
  math.attr("WGMMA_DEPTH") = cuda::kWgmmaDepth;
  math.attr("WGMMA_PARTIAL_BYTES") = cuda::kWgmmaPartialBytes;
  math.attr("WGMMA_ARRIVALS") = cuda::kWgmmaArrivals;
  math.def("gemm_bucket", &cuda::gemm_bucket, "rows"_a);
  math.attr("GEMV_MAX_ROWS") = cuda::kGemvMaxRows;
  math.attr("GEMV_WARPS") = cuda::kGemvWarps;
  math.def("gemv_rows", &cuda::gemv_rows, "rows"_a);
  math.attr("MMA_GEMV_MAX_ROWS") = cuda::kMmaGemvMaxRows;
  math.def("mma_gemv_warps", &cuda::mma_gemv_warps, "columns"_a, "is_gated"_a);
  math.def("mma_gemv_shared_bytes", &cuda::mma_gemv_shared_bytes, "warps"_a, "slots"_a);
  math.def(
      "gemv",
      [](int64_t columns) {
        const int each = cuda::gemv_columns(columns);
        return py::make_tuple(each, cuda::gemv_blocks(columns, each));
      },
      "columns"_a, "(columns a warp, blocks)");
  math.attr("GEMV_NORM_MAX_ROWS") = cuda::kGemvNormMaxRows;
  math.attr("QKV_WARPS") = cuda::kQkvWarps;
  math.attr("QKV_MAX_WIDTH") = cuda::kQkvMaxWidth;
  math.def("qkv_blocks", &cuda::qkv_blocks, "heads"_a);
  math.def("qkv_shared_bytes", &cuda::qkv_shared_bytes, "head_dim"_a);
  math.def("attention_shared_bytes", &cuda::attention_shared_bytes, "head_dim"_a, "value_dim"_a,
           "tile"_a);
  math.def("attention_fits", &cuda::attention_fits, "head_dim"_a, "value_dim"_a, "tile"_a);
  math.attr("TILED_ROWS") = cuda::kTiledRows;
  math.attr("TILED_SPAN") = cuda::kTiledSpan;
  math.def("tiled_warps", &cuda::tiled_warps, "width"_a);
  math.def("tiled_split_bytes", &cuda::tiled_split_bytes, "width"_a, "warps"_a, "is_f8"_a);
  math.def("has_wide_kernel", &cuda::has_wide_kernel, "width"_a);
  math.def("tiled_fits", &cuda::tiled_fits, "width"_a, "shared_bytes"_a);
  math.def(
      "tiled_plan",
      [](const std::vector<std::pair<int64_t, int64_t>>& sequences, int width) {
        cuda::TiledPlan plan;
        for (const auto& [rows, kv_len] : sequences) plan.add(rows, kv_len, width);
        return py::make_tuple(plan.row_tiles, plan.spans, plan.split_rows, plan.num_partials(1));
      },
      "sequences"_a, "width"_a,
      "(rows, KV length) -> (row tiles, spans, split rows, partials a sequence)");
  math.def("wgmma_bytes", &cuda::wgmma_bytes, "width"_a);
  math.def(
      "wgmma_plan",
      [](const std::vector<int64_t>& rows, int64_t group, int width) {
        cuda::TiledPlan plan{.wgmma_rows = cuda::wgmma_from_rows(group)};
        for (const int64_t n : rows) plan.add(n, n, width);
        return py::make_tuple(plan.row_tiles, plan.split_rows, plan.wgmma_tiles);
      },
      "rows"_a, "group"_a, "width"_a, "(row tiles, split rows, wgmma's row tiles)");
  math.attr("WGMMA_ROWS") = cuda::kWgmmaRows;
  math.def(
      "tiled_walk",
      [](int choice, int64_t spans, int64_t rows) {
        return cuda::tiled_walk(static_cast<cuda::DecodeSpans>(choice), spans, rows);
      },
      "choice"_a, "spans"_a, "rows"_a, "one, two, enough, all -> spans a warp takes");
  math.attr("MAX_PARTIAL_BYTES") = cuda::kMaxPartialBytes;
  math.def(
      "partial_parts",
      [](const std::vector<std::pair<int64_t, int64_t>>& sequences, int64_t kv_heads, int width) {
        cuda::TiledPlan plan;
        for (const auto& [rows, kv_len] : sequences) plan.add(rows, kv_len, width);
        const int64_t n =
            plan.sequences_at_once(static_cast<int64_t>(sequences.size()), kv_heads, width);
        return py::make_tuple(n, n * plan.sequence_bytes(kv_heads, width));
      },
      "sequences"_a, "kv_heads"_a, "width"_a, "(sequences split at once, bytes that they pass on)");
  math.def("max_partial_bytes", &cuda::max_partial_bytes, "sequences"_a, "context"_a, "kv_heads"_a,
           "group"_a, "width"_a);
  math.attr("COLUMN_STRETCH") = cuda::kColumnStretch;
  math.attr("COLUMN_SPLIT_ROWS") = cuda::kColumnSplitRows;
  math.def(
      "column_form",
      [](int key_width, int value_width, bool has_values_in_keys, bool is_f8, int64_t rows,
         int64_t shared_bytes) {
        const cuda::ColumnShape shape{key_width, value_width, has_values_in_keys, is_f8};
        if (!cuda::columns_fit(shape, shared_bytes)) return std::tuple(0, 0, int64_t{0});
        const cuda::ColumnForm form = cuda::column_form(shape, rows, shared_bytes);
        return std::tuple(form.row_tiles, form.ring,
                          cuda::column_bytes(shape, form.row_tiles, form.ring));
      },
      "key_width"_a, "value_width"_a, "has_values_in_keys"_a, "is_f8"_a, "rows"_a, "shared_bytes"_a,
      "(row tiles, halves of units, shared bytes) of a block; zeros: there is no kernel");
  math.def(
      "column_parts",
      [](const std::vector<std::pair<int64_t, int64_t>>& sequences, int64_t kv_heads, int width) {
        cuda::ColumnPlan plan;
        for (const auto& [rows, kv_len] : sequences) plan.add(rows, kv_len);
        const auto n = static_cast<int64_t>(sequences.size());
        return py::make_tuple(plan.at_once(n, kv_heads, width), plan.slots(n, kv_heads, width),
                              plan.bytes(n, kv_heads, width));
      },
      "sequences"_a, "kv_heads"_a, "width"_a,
      "(rows, KV length) -> (sequences split at once, pieces of each, bytes that they pass on)");
  math.def("max_column_bytes", &cuda::max_column_bytes, "sequences"_a, "context"_a, "kv_heads"_a,
           "width"_a);
  math.def("num_recorded_rows", &num_recorded_rows, "n"_a, "max_rows"_a);
  math.def("recorded_context", &recorded_context, "num_tokens"_a, "max_model_len"_a);
  math.def("new_keys", &new_keys, "keys"_a, "max_size"_a);
  math.def(
      "recorded_shape",
      [](const StepPlanRecord& record, int64_t max_num_seqs, int64_t max_model_len,
         int64_t block_size) {
        const auto shape = recorded_shape(record.plan, {.max_num_seqs = max_num_seqs,
                                                        .max_model_len = max_model_len,
                                                        .block_size = block_size});
        return shape ? std::optional(std::tuple(shape->batch.num_rows, shape->batch.max_blocks,
                                                shape->lengths, shape->draws))
                     : std::nullopt;
      },
      "plan"_a, "max_num_seqs"_a, "max_model_len"_a, "block_size"_a,
      "(rows, blocks, what tells the sequences' lengths apart, whether it draws), or None");
  math.def("alignment_bytes", &cuda::alignment_bytes, "value"_a);
}

}  // namespace llmserve
