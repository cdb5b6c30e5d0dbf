#include "comm/kv_host.h"

namespace llmserve {

KvHost::KvHost(const KvLink& link, std::chrono::milliseconds lease,
               const std::vector<std::string>& addresses)
    : link_(link),
      leases_(link.shape.block_size, lease),
      local_(std::in_place, leases_, link),
      addresses_{local_->address()} {
  if (addresses.empty()) return;
  std::vector<SocketAddress> parsed;
  for (const std::string& text : addresses) parsed.push_back(SocketAddress::parse(text));
  server_.emplace(leases_, link, parsed);
  for (const SocketAddress& address : server_->addresses()) addresses_.push_back(address.text());
}

KvHost::~KvHost() {
  leases_.stop();
  server_.reset();
  local_.reset();
}

}  // namespace llmserve
