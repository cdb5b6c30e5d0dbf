// Steps in flight, the oldest first. A ring of records: a record keeps its memory from step to
// step, and stays where it is while its step is in flight.
#pragma once

#include <array>
#include <cstdint>

namespace llmserve {

template <class Flight, int32_t N>
class FlightRing {
 public:
  // At most `capacity` <= N steps are in flight. A ring of one uses one record, which stays warm.
  explicit FlightRing(int32_t capacity = N) : capacity_(capacity) {}

  int32_t size() const { return size_; }
  bool is_empty() const { return size_ == 0; }

  // The i-th in flight; size() < capacity: [size()] is the record of the step that begins next.
  Flight& operator[](int32_t i) { return flights_[static_cast<size_t>((oldest_ + i) % capacity_)]; }
  const Flight& operator[](int32_t i) const {
    return flights_[static_cast<size_t>((oldest_ + i) % capacity_)];
  }
  Flight& oldest() { return (*this)[0]; }
  Flight& newest() { return (*this)[size_ - 1]; }
  Flight& next() { return (*this)[size_]; }

  // next() is in flight from now on.
  void launch() { ++size_; }
  // oldest() is not any more; its record is valid until the next step begins.
  Flight& retire() {
    Flight& retired = oldest();
    oldest_ = (oldest_ + 1) % capacity_;
    --size_;
    return retired;
  }
  void clear() { size_ = 0; }

 private:
  const int32_t capacity_;
  std::array<Flight, N> flights_;
  int32_t oldest_ = 0;
  int32_t size_ = 0;
};

}  // namespace llmserve
