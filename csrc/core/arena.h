// One step's activations: a bump allocator over a buffer whose size is fixed at load, so that a
// step never allocates.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "core/buffer.h"
#include "core/tensor.h"

namespace llmserve {

class Arena {
 public:
  explicit Arena(int64_t capacity_bytes, Memory& memory = host_memory())
      : buffer_(capacity_bytes, memory) {}

  // A contiguous tensor, 64-byte aligned, uninitialised, valid until the enclosing Scope ends.
  // Throws InternalError past the capacity: the plan that sized the arena was wrong.
  Tensor allocate(DType dtype, std::initializer_list<int64_t> dims);

  int64_t capacity_bytes() const { return buffer_.num_bytes(); }
  int64_t peak_bytes() const { return peak_; }

  // What is allocated inside a scope is given back at its end.
  class Scope {
   public:
    explicit Scope(Arena& arena) : arena_(arena), used_(arena.used_) {}
    ~Scope() { arena_.used_ = used_; }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Arena& arena_;
    int64_t used_;
  };

  // Bytes that a tensor takes in an arena, alignment included; what plans are added up from.
  static int64_t footprint_bytes(DType dtype, std::initializer_list<int64_t> dims);

 private:
  Buffer buffer_;
  int64_t used_ = 0;
  int64_t peak_ = 0;
};

}  // namespace llmserve
