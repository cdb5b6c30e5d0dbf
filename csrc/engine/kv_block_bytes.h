// The blocks of all ranks' KV storage as bytes of the wire, whose layout is nobody's own: of each
// layer of the group the keys of all heads [K, P, row], then the values, where they are not in the
// keys. A row is as the cache's dtype has it; in f8 the P scales of a head follow its rows. So
// engines exchange blocks whatever their numbers of ranks and stages and the layouts of their keys
// are.
#pragma once

#include <vector>

#include "comm/kv_leases.h"
#include "core/cache_group.h"
#include "engine/worker.h"

namespace llmserve {

// Of a whole block.
struct ByteRange {
  size_t begin = 0;
  size_t size = 0;
};

class KvBlockBytes final : public KvBlocks {
 public:
  // The workers outlive it, and have open copies (Worker::open_copies). Their KV caches are there
  // whenever a block is read or written. Of heads and layers that none of them has, nothing is read
  // or written.
  explicit KvBlockBytes(const std::vector<const Worker*>& workers);

  const KvWireShape& shape() const override { return shape_; }
  void read(uint16_t group, int32_t block, int64_t num_tokens,
            std::span<std::byte> out) const override;
  void write(uint16_t group, int32_t block, Bytes in) override;
  // What of a block the workers have, in order.
  std::vector<ByteRange> ranges(uint16_t group) const;

 private:
  // Keys or values of a lane on one rank, and the heads of all that it has.
  struct Part {
    const Worker* worker = nullptr;
    Tensor tensor;  // [N, K of the rank, P, width]
    bool is_in_panels = false;
    int64_t first_head = 0;
  };
  // One of a worker's lanes.
  struct Lane {
    const Worker* worker = nullptr;
    size_t idx = 0;
  };
  // Of a head in a whole block: parts that have it, among those of its lane.
  struct Head {
    int64_t idx = 0;
    ByteRange range;
    std::vector<const Part*> parts;
  };
  template <class Visit>
  void for_each_head(uint16_t group, const Visit& visit) const;
  static std::vector<Part> parts(const std::vector<Lane>& ranks, bool are_values);
  // Of the first num_tokens rows, and zeros after them.
  static void read_head(const Part& part, const std::byte* from, int64_t num_tokens,
                        std::span<std::byte> to);
  static void write_head(const Part& part, Bytes from, std::byte* to);

  const std::vector<CacheGroupSpec> groups_;
  const DType dtype_;
  const int64_t block_size_;
  KvWireShape shape_;
  const std::vector<const Worker*> workers_;
  // [groups][layers of the group][ranks of its stage]
  std::vector<std::vector<std::vector<Lane>>> lanes_;
};

}  // namespace llmserve
