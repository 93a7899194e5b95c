// Folders of checkpoints.
// SPDX-License-Identifier: Apache-2.0
#include "durable/checkpoints.h"

#include <ballast/base/error.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <thread>

namespace ballast::engine {
namespace {

void flush_directory(const std::string& path) { io::make_small_files(path)->flush_directory(); }

std::string parent_of(const std::string& path) {
  const std::filesystem::path parent = std::filesystem::path(path).parent_path();
  return parent.empty() ? "." : parent.string();
}

// A folder of that name may be another program's, whose files are not to be removed.
bool may_be_checkpoint(const std::string& path) {
  std::error_code error;
  const std::filesystem::directory_iterator files(path, error);
  if (error) return false;
  const auto ours = [](const auto& file) { return file.path().filename().string().starts_with("ballast-rank"); };
  return begin(files) == end(files) || std::any_of(begin(files), end(files), ours);
}

// What interrupted saves, of any step, have left. The folder is locked.
void remove_interrupted(const std::string& directory) {
  for (const std::string& name : io::make_small_files(directory)->list()) {
    const bool left = name.starts_with("step-") && name.ends_with(".new") &&
                      name.find_first_not_of("0123456789", 5) == name.size() - 4;
    if (left) remove_folder(directory + "/" + name);
  }
}

// By another name first: a folder that is half removed must not look like a checkpoint.
void remove_checkpoint(const std::string& path) {
  const std::string going = CheckpointFolder::unpublished(path);
  remove_folder(going);
  if (std::rename(path.c_str(), going.c_str()) != 0) {
    throw IoError("old checkpoint " + path + " cannot be removed: " + std::strerror(errno));
  }
  remove_folder(going);
}

}  // namespace

FolderLock::FolderLock(const std::string& folder)
    : descriptor_(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  if (descriptor_ < 0) throw IoError("folder " + folder + " cannot be opened: " + std::strerror(errno));
  if (::flock(descriptor_, LOCK_EX | LOCK_NB) == 0) return;
  int why = errno;
  if (why != EWOULDBLOCK && (why = lock_file_in(folder)) == 0) return;
  if (file_ >= 0) ::close(file_);
  ::close(descriptor_);
  throw IoError("folder " + folder +
                (why == EWOULDBLOCK || why == EACCES
                     ? " is being written to by another run; give each a folder of its own"
                     : std::string(" cannot be locked: ") + std::strerror(why)));
}

// Some file systems of the net lock only what is open for writing, which a folder cannot be. The file stays, as whoever
// waits for it would hold one without a name. 0 or an errno.
int FolderLock::lock_file_in(const std::string& folder) {
  file_ = ::open((folder + "/.ballast-lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOCTTY, 0644);
  if (file_ < 0) return errno == EACCES ? EPERM : errno;
  struct flock whole = {};
  whole.l_type = F_WRLCK;
  whole.l_whence = SEEK_SET;
  return ::fcntl(file_, F_OFD_SETLK, &whole) == 0 ? 0 : errno == EAGAIN ? EWOULDBLOCK : errno;
}

FolderLock::~FolderLock() {
  // Also where a child of this process has inherited the descriptors.
  if (file_ >= 0) {
    struct flock whole = {};
    whole.l_type = F_UNLCK;
    whole.l_whence = SEEK_SET;
    static_cast<void>(::fcntl(file_, F_OFD_SETLK, &whole));
    ::close(file_);
  }
  static_cast<void>(::flock(descriptor_, LOCK_UN));
  ::close(descriptor_);
}

CheckpointFolder::CheckpointFolder(std::string path) : path_(std::move(path)), parent_(parent_of(path_)) {
  make_folder(parent_);
  lock_.emplace(parent_);
  std::error_code error;
  if (std::filesystem::exists(std::filesystem::symlink_status(path_, error)) && !may_be_checkpoint(path_)) {
    throw IoError(path_ + " is there and is no checkpoint; move it away, or save to another folder");
  }
  remove_interrupted(parent_);
  remove_folder(unpublished(path_));
  if (!std::filesystem::create_directory(unpublished(path_), error) || error) {
    throw IoError("checkpoint folder " + unpublished(path_) + " cannot be made: " + error.message());
  }
}

CheckpointFolder::~CheckpointFolder() {
  if (published_) return;
  std::error_code ignored;  // what is left is removed by the next save
  std::filesystem::remove_all(unpublished(path_), ignored);
}

void CheckpointFolder::publish() {
  flush_directory(unpublished(path_));
  struct stat status;
  const bool there = ::stat(path_.c_str(), &status) == 0;
  // An older folder of that name is exchanged for the new one, so that at every moment one of them has the name.
  if (::renameat2(AT_FDCWD, unpublished(path_).c_str(), AT_FDCWD, path_.c_str(), there ? RENAME_EXCHANGE : 0) != 0) {
    throw IoError("checkpoint " + unpublished(path_) + " cannot be put in place as " + path_ + ": " +
                  std::strerror(errno));
  }
  published_ = true;
  flush_directory(parent_);
  if (there) remove_folder(unpublished(path_));
}

void CheckpointFolder::prune(std::size_t keep) {
  auto others = list_checkpoints(parent_);
  std::erase_if(others, [&](const auto& other) { return other.second == path_; });
  for (std::size_t i = keep - 1; keep > 0 && i < others.size(); ++i) remove_checkpoint(others[i].second);
}

std::vector<std::pair<std::uint64_t, std::string>> list_checkpoints(const std::string& directory) {
  std::vector<std::pair<std::uint64_t, std::string>> found;
  const auto files = io::make_small_files(directory);
  for (const std::string& name : files->list()) {
    if (!name.starts_with("step-")) continue;
    std::uint64_t step = 0;
    const auto [at, error] = std::from_chars(name.data() + 5, name.data() + name.size(), step);
    const bool named = error == std::errc{} && at == name.data() + name.size();
    if (named && may_be_checkpoint(files->path(name))) found.emplace_back(step, files->path(name));
  }
  std::sort(found.rbegin(), found.rend());
  return found;
}

bool has_all_ranks(const std::shared_ptr<io::SmallFiles>& files, std::uint64_t step, std::uint32_t elsewhere) {
  const std::vector<std::uint32_t> ranks = ManifestLog::ranks_of(*files, step);
  if (ranks.empty() || ranks.front() != 0) return false;
  StoredLayout layout;
  Manifest manifest;
  try {
    ManifestLog(files, 0).load(step, &layout, &manifest);
  } catch (const CorruptionError&) {
    return true;
  }
  const std::uint32_t holders = layout.partition.all_shards ? 1 : layout.partition.world_size;
  return elsewhere >= holders || (ranks.size() >= holders && ranks[holders - 1] == holders - 1);
}

std::optional<FoundCheckpoint> find_checkpoint(const std::string& path) {
  std::vector<std::string> folders = {path};
  for (auto& [step, folder] : list_checkpoints(path)) folders.push_back(std::move(folder));
  for (const std::string& folder : folders) {
    const std::shared_ptr<io::SmallFiles> files = io::make_small_files(folder);
    const std::vector<std::uint64_t> steps = ManifestLog::steps_of(*files);
    if (steps.empty()) continue;
    const auto whole = std::find_if(steps.begin(), steps.end(), [&](auto step) { return has_all_ranks(files, step); });
    return FoundCheckpoint{folder, whole == steps.end() ? steps.front() : *whole};
  }
  return std::nullopt;
}

void tidy_checkpoints(const std::string& directory) {
  if (!std::filesystem::is_directory(directory)) return;
  try {
    const FolderLock lock(directory);
    remove_interrupted(directory);
  } catch (const IoError&) {
    // Whoever only reads here is not held up: another run writes, or the next save says what is wrong.
  }
}

void remove_checkpoints(const std::string& directory) {
  if (!std::filesystem::is_directory(directory)) return;
  const FolderLock lock(directory);
  const auto all = list_checkpoints(directory);
  // The oldest first: what an interruption leaves is a run up to its newest.
  for (auto i = all.rbegin(); i != all.rend(); ++i) remove_checkpoint(i->second);
  remove_interrupted(directory);
}

void remove_folder(const std::string& path) {
  std::error_code error;
  std::filesystem::remove_all(path, error);
  if (error) throw IoError(path + " cannot be removed: " + error.message());
}

void make_folder(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) throw IoError(path + " cannot be made: " + error.message());
}

void wait_until_unlocked(const std::string& file) {
  const int descriptor = ::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
  if (descriptor < 0) return;  // none, or one that opening it will say more about
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  bool locked = false;
  while (!(locked = ::flock(descriptor, LOCK_EX | LOCK_NB) == 0) && errno == EWOULDBLOCK &&
         std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  const int why = errno;
  ::close(descriptor);
  if (!locked && why == EWOULDBLOCK) {
    throw IoError("chunk file " + file +
                  " is in use by another process; let it end, or give each engine a directory of its own");
  }
}

}  // namespace ballast::engine
