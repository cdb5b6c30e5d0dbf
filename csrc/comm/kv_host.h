// Where engines of one process that run one model keep blocks for others, and are found: by all of
// this process, and at the addresses that it listens on.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "comm/kv_leases.h"
#include "comm/kv_server.h"
#include "comm/kv_transport.h"

namespace llmserve {

class KvHost {
 public:
  // addresses: "tcp:HOST:PORT", "shm:NAME", or none. Throws InvalidArgument where it cannot listen.
  KvHost(const KvLink& link, std::chrono::milliseconds lease,
         const std::vector<std::string>& addresses);
  ~KvHost();  // whoever fetches is told that it ends
  KvHost(const KvHost&) = delete;
  KvHost& operator=(const KvHost&) = delete;

  const KvLink& link() const { return link_; }
  KvLeases& leases() { return leases_; }
  // Where others of this process find it, then where it listens.
  const std::vector<std::string>& addresses() const { return addresses_; }

 private:
  const KvLink link_;
  KvLeases leases_;
  std::optional<LocalKvHost> local_;
  std::optional<KvServer> server_;
  std::vector<std::string> addresses_;
};

}  // namespace llmserve
