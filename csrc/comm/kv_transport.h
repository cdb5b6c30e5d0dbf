// How blocks come from a peer: one of its leases, all blocks that were asked for, in order.
//
//   in process      the two engines share an address space: blocks are read where they lie
//   shared memory   "shm:NAME": blocks through slots that the receiver has made, frames by a socket
//   TCP             "tcp:HOST:PORT": blocks in frames
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/kv_connection.h"
#include "comm/kv_leases.h"

namespace llmserve {

struct KvPull {
  uint64_t id = 0;     // of the lease
  uint64_t epoch = 0;  // of the start that it is of
  uint32_t num_tokens = 0;
  TokenHash prefix;
  std::vector<BlockPlace> blocks;
};

class KvTransport {
 public:
  // Of one block, in its turn.
  using Take = std::function<void(const BlockPlace& block, Bytes bytes)>;

  virtual ~KvTransport() = default;
  // Returns when all have been taken and the sender has confirmed that they are of these tokens:
  // not before may anybody use them. Throws HandOverError.
  virtual void pull(const KvPull& pull, const Take& take) = 0;
  // pull() throws soon, or as soon as it is called. Any thread.
  virtual void cancel() noexcept = 0;
};

// To an address of a peer. Throws InvalidArgument for what is none.
std::unique_ptr<KvTransport> make_kv_transport(const std::string& address, const KvLink& link);

// An engine's leases, for others in this process to find: "local:" and its epoch.
class LocalKvHost {
 public:
  // `leases` outlives it.
  LocalKvHost(KvLeases& leases, const KvLink& link);
  ~LocalKvHost();  // waits for who reads
  LocalKvHost(const LocalKvHost&) = delete;
  LocalKvHost& operator=(const LocalKvHost&) = delete;
  std::string address() const;

 private:
  KvLeases& leases_;
};

}  // namespace llmserve
