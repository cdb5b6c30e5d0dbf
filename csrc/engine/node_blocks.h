// The KV blocks of a model on several nodes, for hand-overs: each node has the rows of its ranks'
// heads and layers, and node 0 brings a block together or sends it to all.
//
// Little-endian. Read block, write block: group u16, block u32, tokens u32; then a whole block's
// bytes (engine/kv_block_bytes.h), to be written. Block, which answers the first: the number of
// ranges u32, each its begin and size in a whole block as u32, then their bytes. `done` answers the
// second, and `failed` either.
#pragma once

#include <cstddef>
#include <vector>

#include "comm/rank_link.h"
#include "engine/kv_block_bytes.h"

namespace llmserve {

class NodeLeader;  // engine/node_leader.h

class NodeBlocks final : public KvBlocks {
 public:
  // The workers of node 0. What it refers to outlives it.
  NodeBlocks(const std::vector<const Worker*>& workers, NodeLeader& leader)
      : own_(workers), leader_(leader) {}

  const KvWireShape& shape() const override { return own_.shape(); }
  // Any thread. Both throw DeviceError where a node does not answer, which is lost then.
  void read(uint16_t group, int32_t block, int64_t num_tokens,
            std::span<std::byte> out) const override;
  void write(uint16_t group, int32_t block, Bytes in) override;

 private:
  KvBlockBytes own_;
  NodeLeader& leader_;
};

// Another node's side: answers over `link` from the storage of its workers, until the link ends.
// num_blocks: of the KV cache. has_cache() says whether it is there. Throws DeviceError.
void serve_blocks(RankLink& link, KvBlockBytes& blocks, int32_t num_blocks,
                  const std::function<bool()>& has_cache);

}  // namespace llmserve
