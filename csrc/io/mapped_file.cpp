#include "io/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "core/error.h"

namespace fs = std::filesystem;

namespace llmserve {
namespace {

// Closes a descriptor; a mapping outlives it.
struct FileDescriptor {
  int fd;
  ~FileDescriptor() {
    if (fd >= 0) close(fd);
  }
};

bool is_plain_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." &&
         name.find_first_of(std::string_view("/\\\0", 3)) == name.npos;
}

int64_t nanoseconds(const timespec& time) {
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

// Opens without following a link and without waiting on a pipe.
std::shared_ptr<const MappedFile> map_regular_file(const fs::path& shown,
                                                   const fs::path& resolved) {
  const FileDescriptor file{open(resolved.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK)};
  struct stat status{};
  if (file.fd < 0 || fstat(file.fd, &status) != 0)
    throw CorruptFile(concat(shown.string(), ": cannot be opened: ", std::strerror(errno)));
  if (!S_ISREG(status.st_mode))
    throw CorruptFile(concat(shown.string(), ": is not a regular file"));
  const size_t num_bytes = static_cast<size_t>(status.st_size);
  const std::byte* data = nullptr;
  if (num_bytes > 0) {
    void* mapped = mmap(nullptr, num_bytes, PROT_READ, MAP_PRIVATE, file.fd, 0);
    if (mapped == MAP_FAILED)
      throw ResourceExhausted(
          concat(shown.string(), ": cannot map ", num_bytes, " bytes: ", std::strerror(errno)));
    data = static_cast<const std::byte*>(mapped);
  }
  const MappedFile::Times times{nanoseconds(status.st_mtim), nanoseconds(status.st_ctim)};
  return std::make_shared<const MappedFile>(shown, data, static_cast<int64_t>(num_bytes), times);
}

}  // namespace

MappedFile::MappedFile(fs::path path, const std::byte* data, int64_t num_bytes, const Times& times)
    : path_(std::move(path)), data_(data), num_bytes_(num_bytes), times_(times) {
  // By its name alone: a server tells its clients why a step failed, and no path.
  const auto state = std::make_shared<ReadState>(name());
  if (data_) guard_.emplace(data_, static_cast<size_t>(num_bytes_), *state);
  read_state_ = state;
}

MappedFile::~MappedFile() {
  guard_.reset();
  if (data_) munmap(const_cast<std::byte*>(data_), static_cast<size_t>(num_bytes_));
}

std::string_view MappedFile::text() const {
  return {reinterpret_cast<const char*>(data_), static_cast<size_t>(num_bytes_)};
}

// Hints: if the system declines, pages merely stay, or come when they are read.
void MappedFile::advise(int64_t offset, int64_t num_bytes, int advice) const {
  const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t begin = offset / page * page;
  const int64_t end = std::min(num_bytes_, offset + num_bytes);
  if (!data_ || begin >= end) return;
  madvise(const_cast<std::byte*>(data_ + begin), static_cast<size_t>(end - begin), advice);
}

void MappedFile::release(int64_t offset, int64_t num_bytes) const {
  advise(offset, num_bytes, MADV_DONTNEED);
}

void MappedFile::fetch(int64_t offset, int64_t num_bytes) const {
  constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ of Linux 5.14, which old headers lack
  advise(offset, num_bytes, kPopulateRead);
}

CheckpointDirectory::CheckpointDirectory(const std::string& path, std::string config_text)
    : path_(path), config_text_(std::move(config_text)) {
  std::error_code error;
  const bool is_weights = path_.extension() == ".safetensors" || path_.extension() == ".gguf";
  if (is_weights && fs::is_regular_file(path_, error)) {
    weights_file_ = path_.filename().string();
    path_ = path_.has_parent_path() ? path_.parent_path() : fs::path(".");
  }
  if (path.find('\0') != path.npos || !fs::is_directory(path_, error))
    throw InvalidArgument(
        concat("model: expected a checkpoint directory, got \"", path, "\", ",
               fs::exists(path_, error) ? "which is not a directory" : "which does not exist"));
  canonical_ = fs::canonical(path_, error);
  if (error) throw InvalidArgument(concat("model: cannot open \"", path, "\": ", error.message()));
}

bool CheckpointDirectory::contains(std::string_view name) const {
  std::error_code error;
  return is_plain_name(name) &&
         fs::symlink_status(path_ / name, error).type() != fs::file_type::not_found;
}

std::vector<std::string> CheckpointDirectory::list() const {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(path_, error))
    names.push_back(entry.path().filename().string());
  if (error)
    throw InvalidArgument(concat("model: cannot list \"", path_.string(), "\": ", error.message()));
  std::sort(names.begin(), names.end());
  return names;
}

std::shared_ptr<const MappedFile> CheckpointDirectory::map(std::string_view name) const {
  if (!is_plain_name(name))
    throw CorruptFile(concat(path_.string(), ": \"", name,
                             "\" is not a plain file name; a checkpoint may only name files in its "
                             "own directory"));
  const fs::path shown = path_ / name;
  std::error_code error;
  const fs::path resolved = fs::canonical(canonical_ / name, error);
  if (error) throw CorruptFile(concat(shown.string(), ": ", error.message()));

  const fs::path relative = resolved.lexically_relative(canonical_);
  const bool is_inside = !relative.empty() && *relative.begin() != "..";
  const fs::path snapshots = canonical_.parent_path();
  const bool is_hub_blob = snapshots.filename() == "snapshots" &&
                           resolved.parent_path() == snapshots.parent_path() / "blobs";
  if (!is_inside && !is_hub_blob)
    throw CorruptFile(concat(shown.string(),
                             ": is a link that leaves the checkpoint's directory; put the file "
                             "itself there"));
  return map_regular_file(shown, resolved);
}

}  // namespace llmserve
