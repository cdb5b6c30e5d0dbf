#include "comm/message_code.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/error.h"

namespace llmserve {
namespace {

constexpr size_t kBlockBytes = 64;  // of SHA-256

void update(Sha256& sha, Bytes bytes) {
  sha.update({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
}

}  // namespace

TokenHash message_code(Bytes key, std::initializer_list<Bytes> parts) {
  TokenHash short_key;
  if (key.size() > kBlockBytes) {
    Sha256 sha;
    update(sha, key);
    short_key = sha.finish();
    key = bytes_of(short_key);
  }
  std::array<std::byte, kBlockBytes> inner{}, outer{};
  std::ranges::copy(key, inner.begin());
  std::ranges::copy(key, outer.begin());
  for (std::byte& byte : inner) byte ^= std::byte{0x36};
  for (std::byte& byte : outer) byte ^= std::byte{0x5c};
  Sha256 sha;
  update(sha, inner);
  for (const Bytes part : parts) update(sha, part);
  const TokenHash digest = sha.finish();
  Sha256 last;
  update(last, outer);
  update(last, bytes_of(digest));
  return last.finish();
}

bool are_equal(const TokenHash& a, const TokenHash& b) {
  unsigned difference = 0;
  for (size_t i = 0; i < a.bytes.size(); ++i)
    difference |= static_cast<unsigned>(a.bytes[i] ^ b.bytes[i]);
  return difference == 0;
}

void fill_random(std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = getrandom(bytes.data(), bytes.size(), 0);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0)
      throw DeviceError(concat("the system gives no random bytes: ", std::strerror(errno)));
    bytes = bytes.subspan(static_cast<size_t>(count));
  }
}

}  // namespace llmserve
