#include "kernels/cuda/steps/cuda_steps.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>
#include <utility>

#include "core/error.h"
#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/experts/experts.h"
#include "kernels/cuda/experts/id_counts.h"

namespace llmserve::cuda {
namespace {

// Looks at the number of a step so often between two looks at the stream, whose state costs a call
// of the driver (about a microsecond): a step that is done is seen within nanoseconds.
constexpr int kLooks = 200;

// At least so many bytes, in place of what was there: what is in use must not be asked for more.
// Twice what is asked for, so that it is rare; freeing waits for the device.
void grow(Buffer& buffer, int64_t num_bytes, Memory& memory) {
  if (buffer.num_bytes() >= num_bytes) return;
  buffer = Buffer();
  buffer = Buffer(2 * num_bytes, memory);
}

}  // namespace

std::span<std::byte> CudaSteps::begin(int64_t num_bytes, int64_t num_rows, int64_t max_rows) {
  memory_.make_current();
  const int64_t all_bytes = kHeaderBytes + num_bytes;
  if (twin_.num_bytes() < all_bytes) grow_block(2 * all_bytes);  // rarely, if nothing is reserved
  if (max_rows_ < std::max(max_rows, int64_t{1})) grow_rows(std::max(2 * max_rows, int64_t{1}));
  ++step_;
  followed_ = nullptr;
  slot().brought_over.wait();
  num_bytes_ = all_bytes;
  num_rows_[static_cast<size_t>(step_ % kNumSlots)] = num_rows;
  samplings(step_).count = 0;
  *reinterpret_cast<StepHeader*>(slot().data.data()) = {
      .step = step_, .num_rows = num_rows, .result_begin = step_ % kNumSlots * result_bytes_};
  return {slot().data.data() + kHeaderBytes, static_cast<size_t>(num_bytes)};
}

void CudaSteps::follow(std::span<const std::byte> block, int64_t num_rows, int64_t max_rows) {
  std::ranges::copy(block, begin(std::ssize(block), num_rows, max_rows).data());
  followed_ = block.data();
}

int64_t CudaSteps::device_bytes(const StepShape& shape) {
  constexpr auto kRowBytes = static_cast<int64_t>(sizeof(DrawnRow) + sizeof(DrawRow));
  return kHeaderBytes + shape.block_bytes + shape.max_tokens * kRowBytes +
         shape.max_logit_rows * shape.vocab_size * static_cast<int64_t>(sizeof(float));
}

void CudaSteps::reserve(const StepShape& shape) {
  memory_.make_current();
  if (twin_.num_bytes() < kHeaderBytes + shape.block_bytes)
    grow_block(kHeaderBytes + shape.block_bytes);
  if (max_rows_ < shape.max_tokens) grow_rows(shape.max_tokens);
  const int64_t weight_bytes =
      shape.max_logit_rows * shape.vocab_size * static_cast<int64_t>(sizeof(float));
  if (weights_.num_bytes() >= weight_bytes) return;
  block_.move();
  weights_ = Buffer();
  weights_ = Buffer(weight_bytes, memory_);
}

// Nothing that is in use moves: the device is waited for.
void CudaSteps::grow_block(int64_t num_bytes) {
  memory_.synchronize();
  block_.move();
  for (Slot& slot : slots_) slot.data = Buffer(num_bytes, pinned_);
  twin_ = Buffer();
  twin_ = Buffer(num_bytes, memory_);
}

// Likewise; results that nobody has taken are copied.
void CudaSteps::grow_rows(int64_t max_rows) {
  memory_.synchronize();
  block_.move();
  const int64_t bytes = kResultHeaderBytes + max_rows * static_cast<int64_t>(sizeof(DrawnRow));
  const int64_t result_bytes = (bytes + 63) / 64 * 64;
  Buffer results(kNumSlots * result_bytes, pinned_);
  for (int64_t i = 0; i < kNumSlots; ++i)
    std::copy_n(results_.data() + i * result_bytes_, result_bytes_,
                results.data() + i * result_bytes);
  Buffer drawn(max_rows * static_cast<int64_t>(sizeof(DrawnRow)), memory_);
  if (max_rows_ > 0) {
    check("cudaMemcpyAsync of drawn tokens",
          cudaMemcpyAsync(drawn.data(), drawn_.data(),
                          static_cast<size_t>(max_rows_) * sizeof(DrawnRow),
                          cudaMemcpyDeviceToDevice, memory_.stream()));
    memory_.synchronize();
  }
  results_ = std::move(results);
  drawn_ = std::move(drawn);
  draw_rows_ = Buffer(max_rows * static_cast<int64_t>(sizeof(DrawRow)), memory_);
  result_bytes_ = result_bytes;
  max_rows_ = max_rows;
}

void CudaSteps::bring_over() {
  check("cudaMemcpyAsync of a step's integers",
        cudaMemcpyAsync(twin_.data(), slot().data.data(), static_cast<size_t>(num_bytes_),
                        cudaMemcpyHostToDevice, memory_.stream()));
  slot().brought_over.record(memory_.stream());
  block_.host = followed_ != nullptr ? followed_ - kHeaderBytes : slot().data.data();
  block_.device = twin_.data();
  block_.num_bytes = num_bytes_;
}

Tensor CudaSteps::brought(std::span<const int32_t> ids) {
  return Tensor(const_cast<int32_t*>(block_.on_device(ids.data())), DType::kI32, {std::ssize(ids)});
}

void CudaSteps::take_awaited(std::span<const int32_t> token_ids,
                             std::span<const int32_t> awaited_rows) {
  cuda::take_awaited(reinterpret_cast<const DrawnRow*>(drawn_.data()),
                     block_.on_device(awaited_rows.data()), static_cast<int64_t>(token_ids.size()),
                     const_cast<int32_t*>(block_.on_device(token_ids.data())), memory_.stream());
}

void CudaSteps::own_experts(const OwnExperts& args) {
  memory_.make_current();
  cuda::own_experts({.ids = args.ids.as<int32_t>(),
                     .num_rows = args.ids.shape[0],
                     .begin = args.begin,
                     .count = args.count,
                     .homes = args.homes ? args.homes.as<int32_t>() : nullptr,
                     .rows_per_token = args.rows_per_token,
                     .local = args.local.as<int32_t>(),
                     .rows = args.rows ? Rows{args.rows.as<float>(), args.rows.strides[0]} : Rows{},
                     .width = args.rows ? args.rows.shape[1] : 0,
                     .weights = args.weights ? args.weights.as<float>() : nullptr},
                    memory_.stream());
}

void CudaSteps::draw(const ConstTensor& logits, std::span<const SeededDraw> draws,
                     int64_t first_row) {
  const int64_t num_rows = logits.shape[0];
  const int64_t vocabulary = logits.shape[1];
  std::byte* z = weights(num_rows * vocabulary * static_cast<int64_t>(sizeof(float)));
  auto* rows = reinterpret_cast<DrawRow*>(draw_rows_.data()) + first_row;
  make_draw_rows(reinterpret_cast<const StepHeader*>(twin_.data()), first_row,
                 block_.on_device(draws.data()), {logits.as<float>(), logits.strides[0]}, num_rows,
                 rows, memory_.stream());
  cuda::draw(rows, num_rows, nullptr, vocabulary, reinterpret_cast<float*>(z),
             reinterpret_cast<DrawnRow*>(drawn_.data()) + first_row, memory_.stream());
}

std::byte* CudaSteps::weights(int64_t num_bytes) {
  if (weights_.num_bytes() < num_bytes) block_.move();
  grow(weights_, num_bytes, memory_);
  return weights_.data();
}

// Both copies are of pinned memory, in the stream's order. The place in the ring is free: whoever
// had it was waited for, or abandoned.
void CudaSteps::sample(const SampleArgs& args, int64_t first_row, const LateTokens& late,
                       std::span<const KeptCounts> kept) {
  std::vector<const int32_t*> late_tokens;
  for (const int32_t idx : late.indices)
    late_tokens.push_back(idx >= 0 ? block_.on_device(&late.token_ids[static_cast<size_t>(idx)])
                                   : nullptr);
  Samplings& step = samplings(step_);
  if (step.count == step.calls.size()) step.calls.emplace_back();
  Sampling& sampling = step.calls[step.count++];
  sampling.call = SampleCall(args.logits, args.rows, late_tokens, kept, &counts_);
  sampling.first_row = first_row;
  sampling.out = args.out;
  const int64_t asked_bytes = sampling.call.asked_bytes();
  grow(sampling.asked, asked_bytes, pinned_);
  grow(sampling.answers, sampling.call.answer_bytes(), pinned_);
  grow(asked_, asked_bytes, memory_);
  grow(answers_, sampling.call.answer_bytes(), memory_);
  sampling.call.write_asked(sampling.asked.data(), asked_.data());
  const auto copy = [&](std::byte* to, const std::byte* from, int64_t num_bytes,
                        cudaMemcpyKind kind) {
    if (num_bytes == 0) return;
    check("cudaMemcpyAsync of a step's sampling",
          cudaMemcpyAsync(to, from, static_cast<size_t>(num_bytes), kind, memory_.stream()));
  };
  copy(asked_.data(), sampling.asked.data(), asked_bytes, cudaMemcpyHostToDevice);
  sampling.call.launch(asked_.data(), answers_.data(), weights(sampling.call.weight_bytes()),
                       reinterpret_cast<DrawnRow*>(drawn_.data()) + first_row, memory_.stream());
  copy(sampling.answers.data(), answers_.data(), sampling.call.answer_bytes(),
       cudaMemcpyDeviceToHost);
  sampling.is_answered.record(memory_.stream());
}

bool CudaSteps::Graph::capture(const DeviceMemory& memory, const std::function<void()>& work) {
  const cudaStream_t stream = memory.stream();
  const int64_t free_bytes = memory.available_bytes();
  check("cudaStreamBeginCapture", cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  bool is_whole = true;
  try {
    work();
  } catch (const std::exception&) {  // what a capture does not allow; else it comes again
    is_whole = false;
  }
  cudaGraph_t graph = nullptr;
  is_whole &= cudaStreamEndCapture(stream, &graph) == cudaSuccess && graph != nullptr;
  is_whole = is_whole && cudaGraphInstantiate(&exec_, graph, 0) == cudaSuccess;
  if (!is_whole) exec_ = nullptr;
  if (graph != nullptr) cudaGraphDestroy(graph);
  if (is_whole && cudaGraphUpload(exec_, stream) == cudaSuccess)  // or the first launch does it
    num_bytes_ = std::max<int64_t>(0, free_bytes - memory.available_bytes());
  cudaGetLastError();  // a capture that failed is no error of later calls
  return is_whole;
}

void CudaSteps::Graph::launch(cudaStream_t stream) const {
  check("cudaGraphLaunch", cudaGraphLaunch(exec_, stream));
}

// The first time it runs as it is, so that kernels are loaded, algorithms measured and buffers as
// large as they have to be: a capture allows none of that.
DeviceSteps::Recording CudaSteps::recording(const RecordKey& key) {
  const std::lock_guard lock(recorded_mutex_);
  if (std::exchange(num_moves_seen_, block_.num_moves) != block_.num_moves) recorded_.clear();
  const auto& entry = recorded_.find(key);
  if (entry.graph.is_captured()) return Recording::kThere;
  return entry.has_run && !entry.is_refused ? Recording::kPossible : Recording::kNone;
}

// Among ranks no kernel starts early: exchanges are kernels of a library, which nobody has measured
// so.
void CudaSteps::ask(const RecordKey& key, const std::function<void()>& work) {
  block_.is_recorded = true;
  starts_early = allows_early_starts_ && key.num_rows <= kMmaGemvMaxRows && !key.is_shared;
  work();
  if (key.draws) publish_results();
  block_.is_recorded = starts_early = false;
}

void CudaSteps::run_asked(const RecordKey& key, const std::function<void()>& work) {
  ask(key, work);
  is_published_ = key.draws;
  const std::lock_guard lock(recorded_mutex_);
  recorded_.find(key).has_run = true;
}

// While it is captured it can be forgotten: a rank that waits for others is freed by that.
bool CudaSteps::record(const RecordKey& key, const std::function<void()>& work) {
  int64_t num_forgotten = 0;
  {
    const std::lock_guard lock(recorded_mutex_);
    num_forgotten = num_forgotten_;
    recorded_.find(key).graph = Graph();
  }
  Graph graph;
  block_.is_captured = true;
  const bool is_whole = graph.capture(memory_, [&] { ask(key, work); });
  block_.is_captured = block_.is_recorded = starts_early = false;
  const std::lock_guard lock(recorded_mutex_);
  ++(is_whole ? record_counts_.num_captures : record_counts_.num_refusals);
  if (num_forgotten != num_forgotten_) return false;
  auto& entry = recorded_.find(key);
  entry.is_refused = !is_whole;
  entry.graph = std::move(graph);
  return is_whole;
}

void CudaSteps::refuse_recording(const RecordKey& key) {
  const std::lock_guard lock(recorded_mutex_);
  auto& entry = recorded_.find(key);
  entry.is_refused = true;
  entry.graph = Graph();
}

void CudaSteps::replay(const RecordKey& key) {
  {
    const std::lock_guard lock(recorded_mutex_);
    const auto& entry = recorded_.find(key);
    if (!entry.graph.is_captured())
      throw DeviceError("a recorded step was given up before it could be launched");
    entry.graph.launch(memory_.stream());
    ++record_counts_.num_replays;
  }
  is_published_ = key.draws;
  if (key.is_shared) marks_.put(memory_.stream());
}

RecordCounts CudaSteps::record_counts() const {
  const std::lock_guard lock(recorded_mutex_);
  RecordCounts counts = record_counts_;
  counts.kept_bytes = recorded_.sum([](const Graph& graph) { return graph.num_bytes(); });
  return counts;
}

void CudaSteps::forget_recorded() {
  memory_.synchronize();
  drop_recorded();
}

void CudaSteps::drop_recorded() noexcept {
  const std::lock_guard lock(recorded_mutex_);
  recorded_.clear();
  ++num_forgotten_;
}

std::unique_ptr<IdCounts> CudaSteps::make_id_counts(int64_t size) {
  return std::make_unique<DeviceIdCounts>(
      size, memory_, pinned_, [this] { return block_.is_recorded ? header() : nullptr; });
}

int64_t CudaSteps::end() {
  if (!std::exchange(is_published_, false)) publish_results();
  block_.num_bytes = 0;
  return step_;
}

void CudaSteps::publish_results() {
  publish(header(), reinterpret_cast<const DrawnRow*>(drawn_.data()), results_.data(),
          kResultHeaderBytes, memory_.stream());
}

std::span<const DrawnRow> CudaSteps::wait(int64_t step) {
  const std::atomic_ref<int64_t> number(*reinterpret_cast<int64_t*>(result(step)));
  memory_.make_current();
  for (int looks = 0; number.load(std::memory_order_acquire) != step; ++looks) {
    if (looks % kLooks != kLooks - 1) continue;
    // A device that has failed writes no more.
    const cudaError_t code = cudaStreamQuery(memory_.stream());
    if (code == cudaErrorNotReady) {
      std::this_thread::yield();
      continue;
    }
    check("a step", code);
    check_internal(number.load(std::memory_order_acquire) == step, "a step gives its results");
  }
  const auto* drawn = reinterpret_cast<const DrawnRow*>(result(step) + kResultHeaderBytes);
  for (size_t i = 0; i < samplings(step).count; ++i) {
    const Sampling& sampling = samplings(step).calls[i];
    sampling.is_answered.wait();  // it comes before the step's number
    sampling.call.read(drawn + sampling.first_row, sampling.answers.data(), sampling.out);
  }
  return {drawn, static_cast<size_t>(num_rows_[static_cast<size_t>(step % kNumSlots)])};
}

void CudaSteps::abandon() noexcept {
  cudaSetDevice(memory_.device());
  cudaStreamSynchronize(memory_.stream());
  cudaGetLastError();
  counts_.distrust();
  block_.num_bytes = 0;
  block_.is_captured = block_.is_recorded = is_published_ = starts_early = false;
}

}  // namespace llmserve::cuda
