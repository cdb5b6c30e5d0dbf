// Serves an engine's leases to the receivers that connect. A thread a connection, of which there
// are few: a receiver fetches one sequence after the other.
#pragma once

#include <atomic>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/kv_connection.h"
#include "comm/kv_leases.h"

namespace llmserve {

class KvServer {
 public:
  static constexpr size_t kMaxConnections = 64;  // more wait to be accepted

  // `leases` outlives it. Throws InvalidArgument where it cannot listen.
  KvServer(KvLeases& leases, const KvLink& link, const std::vector<SocketAddress>& addresses);
  ~KvServer();
  KvServer(const KvServer&) = delete;
  KvServer& operator=(const KvServer&) = delete;

  const std::vector<SocketAddress>& addresses() const { return listener_.addresses(); }

 private:
  struct Connection {
    explicit Connection(int fd) : socket(fd) {}
    StreamSocket socket;
    std::atomic<bool> is_over{false};
    std::thread thread;
  };

  void run();
  void reap(bool all);
  void serve(StreamSocket& socket);
  void send_blocks(KvConnection& connection, const PullFrame& pull, int file);
  template <class Try>
  void await(KvConnection& connection, const Try& has_come) const;

  KvLeases& leases_;
  const KvLink link_;
  Listener listener_;
  std::mutex mutex_;
  std::list<Connection> connections_;
  std::thread thread_;
};

}  // namespace llmserve
