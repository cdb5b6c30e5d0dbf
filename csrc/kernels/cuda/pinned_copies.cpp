#include "kernels/cuda/pinned_copies.h"

#include <algorithm>

#include "core/error.h"
#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/named_stream.h"

namespace llmserve::cuda {
namespace {

// Makes a device current for as long as it lives.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    check("cudaGetDevice", cudaGetDevice(&before_));
    check("cudaSetDevice", cudaSetDevice(device));
  }
  ~CurrentDevice() { cudaSetDevice(before_); }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
};

// Calls copy(piece, its place in the buffer) for each, in order.
template <class Copy>
void for_each_piece(std::span<const DevicePiece> pieces, int64_t max_bytes, const Copy& copy) {
  int64_t begin = 0;
  for (const DevicePiece& piece : pieces) {
    check_internal(begin + piece.num_bytes <= max_bytes, "pieces fit their buffer");
    copy(piece, begin);
    begin += piece.num_bytes;
  }
}

}  // namespace

class PinnedCopies::Taken {
 public:
  explicit Taken(PinnedCopies& owner) : owner_(owner) {
    std::unique_lock lock(owner_.mutex_);
    const auto find = [&] {
      return std::ranges::find_if(owner_.slots_, [](const Slot& slot) { return !slot.is_taken; });
    };
    owner_.is_free_.wait(lock, [&] { return find() != owner_.slots_.end(); });
    slot_ = &*find();
    slot_->is_taken = true;
  }
  ~Taken() {
    const std::lock_guard lock(owner_.mutex_);
    slot_->is_taken = false;
    owner_.is_free_.notify_one();
  }
  Taken(const Taken&) = delete;
  Taken& operator=(const Taken&) = delete;

  Slot& operator*() const { return *slot_; }

 private:
  PinnedCopies& owner_;
  Slot* slot_ = nullptr;
};

PinnedCopies::PinnedCopies(const DeviceMemory& memory, int64_t max_bytes)
    : memory_(memory), max_bytes_(max_bytes), pinned_(memory.device()) {
  const CurrentDevice current(memory.device());
  for (Slot& slot : slots_) slot.data = Buffer(max_bytes, pinned_);
  for (Mark& mark : marks_) mark.event.emplace();
  for (Slot& slot : slots_) slot.stream = make_stream("hand-over transfer", StreamPriority::kLast);
}

PinnedCopies::~PinnedCopies() {
  for (const Slot& slot : slots_)
    if (slot.stream != nullptr) cudaStreamDestroy(slot.stream);
}

void PinnedCopies::mark(int64_t step) {
  const std::lock_guard lock(mutex_);
  Mark& mark = marks_[next_mark_++ % marks_.size()];
  mark.event->record(memory_.stream());
  mark.step = step;
}

void PinnedCopies::follow(int64_t step) {
  const std::lock_guard lock(mutex_);
  const Mark* newest = nullptr;
  for (size_t i = 0; i < marks_.size(); ++i) {
    const Mark& mark = marks_[(next_mark_ + i) % marks_.size()];
    if (mark.step > 0 && mark.step <= step) newest = &mark;
  }
  if (newest == nullptr) return;
  for (const Slot& slot : slots_) newest->event->hold(slot.stream);
}

void PinnedCopies::read(std::span<const DevicePiece> pieces,
                        const std::function<void(const std::byte*)>& take) {
  const Taken taken(*this);
  const Slot& slot = *taken;
  const CurrentDevice current(memory_.device());
  for_each_piece(pieces, max_bytes_, [&](const DevicePiece& piece, int64_t place) {
    check(
        "cudaMemcpyAsync of blocks to the host",
        cudaMemcpyAsync(slot.data.data() + place, piece.data, static_cast<size_t>(piece.num_bytes),
                        cudaMemcpyDeviceToHost, slot.stream));
  });
  check("cudaStreamSynchronize", cudaStreamSynchronize(slot.stream));
  take(slot.data.data());
}

void PinnedCopies::write(std::span<const DevicePiece> pieces,
                         const std::function<void(std::byte*)>& fill) {
  const Taken taken(*this);
  const Slot& slot = *taken;
  fill(slot.data.data());
  const CurrentDevice current(memory_.device());
  for_each_piece(pieces, max_bytes_, [&](const DevicePiece& piece, int64_t place) {
    check(
        "cudaMemcpyAsync of blocks to the device",
        cudaMemcpyAsync(piece.data, slot.data.data() + place, static_cast<size_t>(piece.num_bytes),
                        cudaMemcpyHostToDevice, slot.stream));
  });
  check("cudaStreamSynchronize", cudaStreamSynchronize(slot.stream));
}

}  // namespace llmserve::cuda
