#include "io/packed_cache.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "core/error.h"
#include "core/token_hash.h"

namespace fs = std::filesystem;

namespace llmserve {
namespace {

constexpr std::string_view kSuffix = ".safetensors";
constexpr int64_t kNs = 1'000'000'000;
constexpr std::string_view kUnfinished = ".unfinished";

// A file under another name than its own until it is whole. Locked while its writer lives.
class UnfinishedFile {
 public:
  explicit UnfinishedFile(const fs::path& path) : path_(path) {
    static std::atomic<int> count{0};
    unfinished_ = path;
    unfinished_ += concat(".", getpid(), ".", count++, kUnfinished);
    fd_ = open(unfinished_.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd_ < 0) fail();
    flock(fd_, LOCK_EX | LOCK_NB);
  }
  ~UnfinishedFile() {
    if (fd_ < 0) return;
    unlink(unfinished_.c_str());
    close(fd_);
  }
  UnfinishedFile(const UnfinishedFile&) = delete;
  UnfinishedFile& operator=(const UnfinishedFile&) = delete;

  // Takes the room on the disk, so that a full one is known before it is filled to the brim. Not
  // every file system can.
  void reserve(int64_t num_bytes) {
    if (fallocate(fd_, 0, 0, num_bytes) != 0 && errno != EOPNOTSUPP && errno != ENOSYS) fail();
  }
  void write(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t written = ::write(fd_, bytes.data(), bytes.size());
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) fail();
      bytes = bytes.subspan(static_cast<size_t>(written));
    }
  }
  void finish() {
    if (rename(unfinished_.c_str(), path_.c_str()) != 0) fail();
    close(fd_);
    fd_ = -1;
  }

 private:
  [[noreturn]] void fail() const {
    throw ResourceExhausted(concat(unfinished_.string(), ": ", std::strerror(errno)));
  }

  fs::path path_;
  fs::path unfinished_;
  int fd_ = -1;
};

// Nobody writes it any more.
bool is_abandoned(const fs::path& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return false;
  const bool is_free = flock(fd, LOCK_EX | LOCK_NB) == 0;
  close(fd);
  return is_free;
}

// What people call the model, in characters that every file system takes.
std::string readable(const std::string& model) {
  std::string name = fs::path(model).filename().string().substr(0, 64);
  for (char& c : name)
    if (!isalnum(static_cast<unsigned char>(c)) && c != '.' && c != '-') c = '_';
  return name;
}

std::vector<fs::path> files_in(const fs::path& folder, std::string_view suffix) {
  std::vector<fs::path> paths;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error))
    if (entry.path().string().ends_with(suffix)) paths.push_back(entry.path());
  return paths;
}

}  // namespace

fs::path PackedCache::path_of(const PackedKey& key) const {
  Sha256 hash;
  const std::string text = concat(key.model, '\0', key.files, '\0', key.variant);
  hash.update({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
  return folder_ / concat(readable(key.model), "-", to_hex(hash.finish()).substr(0, 16), kSuffix);
}

std::unique_ptr<PackedFile> PackedCache::find(const PackedKey& key, const RunOnThreads& run,
                                              std::string& warning) const {
  const fs::path path = path_of(key);
  std::error_code error;
  if (!fs::exists(path, error)) return nullptr;
  try {
    const CheckpointDirectory directory(folder_.string());
    auto file = std::make_unique<PackedFile>(directory.map(path.filename().string()), key);
    if (!run) return file;
    file->check(run);
    utimensat(AT_FDCWD, path.c_str(), nullptr, AT_SYMLINK_NOFOLLOW);  // used now; or as it was
    make_room(0);  // the quota may be smaller than it was
    return file;
  } catch (const Error& reason) {
    warning = concat("packed weights are made anew: ", reason.what());
    return nullptr;
  }
}

void PackedCache::store(const PackedKey& key, std::span<const PackedTensor> tensors,
                        const RunOnThreads& run, std::string& warning) const {
  const fs::path path = path_of(key);
  const std::string header = packed_header(key, tensors, run);
  int64_t num_bytes = std::ssize(header);
  for (const PackedTensor& tensor : tensors) num_bytes += std::ssize(tensor.bytes);
  if (num_bytes > quota_bytes_) {
    warning = concat("packed weights are not kept: they take ", num_bytes,
                     " bytes, and packed_cache_bytes is ", quota_bytes_);
    make_room(0);
    return;
  }
  std::error_code error;
  if (fs::create_directories(folder_, error)) fs::permissions(folder_, fs::perms::owner_all, error);
  try {
    fs::remove(path, error);  // of no use any more, or it would have been found
    remove_abandoned();
    make_room(num_bytes);
    UnfinishedFile file(path);
    file.reserve(num_bytes);
    file.write(std::as_bytes(std::span(header)));
    for (const PackedTensor& tensor : tensors) file.write(tensor.bytes);
    file.finish();
  } catch (const Error& reason) {
    warning = concat("packed weights are not kept: ", reason.what());
  }
}

void PackedCache::make_room(int64_t num_bytes) const {
  std::vector<PackedCacheEntry> entries = list();
  int64_t held = 0;
  for (const PackedCacheEntry& entry : entries) held += entry.num_bytes;
  for (const PackedCacheEntry& entry : entries) {
    if (held + num_bytes <= quota_bytes_) return;
    std::error_code error;
    fs::remove(entry.path, error);
    held -= entry.num_bytes;
  }
}

std::vector<PackedCacheEntry> PackedCache::list() const {
  std::vector<PackedCacheEntry> entries;
  for (const fs::path& path : files_in(folder_, kSuffix)) {
    struct stat status{};
    if (lstat(path.c_str(), &status) != 0 || !S_ISREG(status.st_mode)) continue;
    PackedCacheEntry entry{.path = path.string(),
                           .num_bytes = status.st_size,
                           .last_used_ns = status.st_mtim.tv_sec * kNs + status.st_mtim.tv_nsec};
    try {
      const auto file = CheckpointDirectory(folder_.string()).map(path.filename().string());
      PackedKey key = read_packed_key(*file);
      entry.model = std::move(key.model);
      entry.variant = std::move(key.variant);
    } catch (const Error&) {  // is listed without
    }
    entries.push_back(std::move(entry));
  }
  std::ranges::sort(entries, {}, [](const PackedCacheEntry& entry) {
    return std::pair(entry.last_used_ns, entry.path);
  });
  return entries;
}

int64_t PackedCache::remove_abandoned() const {
  int64_t removed = 0;
  for (const fs::path& path : files_in(folder_, kUnfinished)) {
    std::error_code error;
    const auto size = static_cast<int64_t>(fs::file_size(path, error));
    if (!error && is_abandoned(path) && fs::remove(path, error)) removed += size;
  }
  return removed;
}

int64_t PackedCache::clear() const {
  int64_t removed = remove_abandoned();
  for (const PackedCacheEntry& entry : list()) {
    std::error_code error;
    if (fs::remove(entry.path, error)) removed += entry.num_bytes;
  }
  return removed;
}

}  // namespace llmserve
