// Drives one storage per path from one thread, with a full queue of single blocks.
// SPDX-License-Identifier: Apache-2.0
#include "storage_bench.h"

#include <ballast/base/check.h>
#include <ballast/base/error.h>
#include <ballast/base/random.h>
#include <ballast/base/size.h>
#include <ballast/offload/slab.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <optional>

namespace ballast::cli {
namespace {

using Clock = std::chrono::steady_clock;

double cpu_seconds_so_far() {
  struct rusage usage {};
  BALLAST_CHECK(::getrusage(RUSAGE_SELF, &usage) == 0);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// Directories that were made for a measurement, removed in reverse.
class MadeDirectories {
 public:
  ~MadeDirectories() {
    for (auto path = made_.rbegin(); path != made_.rend(); ++path) {
      std::error_code ignored;  // not empty any more: somebody else's now
      std::filesystem::remove(*path, ignored);
    }
  }
  void make(const std::filesystem::path& path) {
    if (path.empty() || std::filesystem::exists(path)) return;
    make(path.parent_path());
    if (std::filesystem::create_directory(path)) made_.push_back(path);
  }

 private:
  std::vector<std::filesystem::path> made_;
};

// An open file without a name.
class NamelessFile {
 public:
  NamelessFile(const std::string& directory, std::uint64_t bytes) {
    const std::string path = directory + "/.ballast-bench-" + std::to_string(::getpid());
    const int flags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC;
    descriptor_ = ::open(path.c_str(), flags | O_DIRECT, 0600);
    if (descriptor_ < 0 && errno == EINVAL) {
      direct_ = false;
      ::unlink(path.c_str());
      descriptor_ = ::open(path.c_str(), flags, 0600);
    }
    if (descriptor_ < 0) throw IoError("cannot make a file in " + directory + ": " + std::strerror(errno));
    ::unlink(path.c_str());
    struct statfs system {};
    // Memory takes "direct" requests too; it is no drive for that.
    if (::fstatfs(descriptor_, &system) == 0 && (system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC))
      direct_ = false;
    const int error = ::posix_fallocate(descriptor_, 0, static_cast<off_t>(bytes));
    if (error == 0 || error == EOPNOTSUPP || error == EINVAL) return;
    ::close(descriptor_);
    std::error_code unknown;
    const auto space = std::filesystem::space(directory, unknown);
    throw IoError("cannot reserve " + base::format_size(bytes) + " in " + directory + ": " + std::strerror(error) +
                  (unknown ? "" : " (" + base::format_size(space.available) + " free)"));
  }
  ~NamelessFile() { ::close(descriptor_); }
  NamelessFile(const NamelessFile&) = delete;
  NamelessFile& operator=(const NamelessFile&) = delete;
  int descriptor() const { return descriptor_; }
  bool direct() const { return direct_; }

 private:
  int descriptor_ = -1;
  bool direct_ = true;
};

}  // namespace

struct StorageBench::Implementation {
  struct Lane {
    std::string directory;
    std::unique_ptr<NamelessFile> file;
    std::vector<io::Operation> operations;
    io::OpenedStorage opened;  // drained before the operations and the file go
    std::uint32_t index = 0;
    std::uint64_t next_block = 0;
    std::uint64_t blocks = 0;  // that a pass covers
  };

  StorageBenchOptions options;
  base::WakeEvent wake;
  MadeDirectories directories;
  std::optional<offload::HostSlab> slab;
  std::vector<Lane> lanes;  // destroyed before the memory that they transfer from
  std::vector<io::Operation*> finished, again;
  std::string memory_note;
  bool direct = true;

  std::uint64_t stamp(const Lane& lane, std::uint64_t block) const {
    return base::random_at(static_cast<std::uint64_t>(&lane - lanes.data()), block);
  }
  // Fills in the operation for the lane's next block.
  void arm(Lane& lane, io::Operation& operation, Pattern pattern) const {
    const std::uint64_t block = lane.next_block++;
    const bool write =
        pattern == Pattern::write || (pattern == Pattern::mixed && block / options.mixed_run_blocks % 2 == 1);
    operation.direction = write ? io::Direction::write : io::Direction::read;
    operation.file = lane.index;
    operation.offset_bytes = block * options.block_bytes;
    operation.bytes = options.block_bytes;
    operation.tag = block;
    if (write) {
      const std::uint64_t mark = stamp(lane, block);
      std::memcpy(operation.data, &mark, sizeof mark);
    }
  }
  void check(const Lane& lane, const io::Operation& operation) const {
    const std::string place = "in " + lane.directory + " at offset " + std::to_string(operation.offset_bytes);
    if (operation.error_number != 0)
      throw IoError((operation.direction == io::Direction::read ? "cannot read " : "cannot write ") + place + ": " +
                    std::strerror(operation.error_number));
    if (operation.direction == io::Direction::write) return;
    std::uint64_t mark = 0;
    std::memcpy(&mark, operation.data, sizeof mark);
    if (mark != stamp(lane, operation.tag)) throw CorruptionError("the bytes read " + place + " are not those written");
  }
  // Takes what has finished on a lane and keeps its queue full. Returns how many finished.
  std::size_t turn(Lane& lane, Pattern pattern, bool wait, std::uint64_t* bytes) {
    io::Storage& storage = *lane.opened.storage;
    const std::size_t count = storage.poll(finished, wait);
    again.clear();
    for (std::size_t i = 0; i < count; ++i) {
      check(lane, *finished[i]);
      *bytes += finished[i]->bytes;
      if (lane.next_block < lane.blocks) {
        arm(lane, *finished[i], pattern);
        again.push_back(finished[i]);
      }
    }
    if (!again.empty()) storage.submit(again);
    return count;
  }
  Result pass(Pattern pattern) {
    Result result;
    const double cpu_before = cpu_seconds_so_far();
    const Clock::time_point begin = Clock::now();
    const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
    for (Lane& lane : lanes) {
      lane.next_block = 0;
      again.clear();
      for (io::Operation& operation : lane.operations) {
        if (lane.next_block == lane.blocks) break;
        arm(lane, operation, pattern);
        again.push_back(&operation);
      }
      lane.opened.storage->submit(again);
    }
    for (bool busy = true; busy;) {
      busy = false;
      std::size_t count = 0;
      for (Lane& lane : lanes) {
        if (lane.opened.storage->outstanding() == 0) continue;
        count += turn(lane, pattern, lanes.size() == 1, &result.bytes);
        busy = busy || lane.opened.storage->outstanding() > 0;
      }
      if (busy && count == 0) wake.wait(1000);
      if (options.pass_seconds_max > 0 && elapsed() > options.pass_seconds_max)
        for (Lane& lane : lanes) lane.blocks = std::min(lane.blocks, std::max<std::uint64_t>(lane.next_block, 1));
    }
    result.seconds = elapsed();
    result.cpu_seconds = cpu_seconds_so_far() - cpu_before;
    return result;
  }
};

StorageBench::StorageBench(const StorageBenchOptions& options) : implementation_(std::make_unique<Implementation>()) {
  Implementation& self = *implementation_;
  self.options = options;
  BALLAST_CHECK(!options.paths.empty() && options.bytes_per_path >= options.block_bytes &&
                options.bytes_per_path % options.block_bytes == 0);
  const std::uint64_t window_bytes = base::round_up(options.block_bytes * options.queue_depth, 2 * base::kMiB);
  if (window_bytes * options.paths.size() > 4 * base::kGiB)
    throw ConfigError("block size times queue depth times paths is " +
                      base::format_size(window_bytes * options.paths.size()) +
                      " of buffers; at most 4 GiB is sensible");
  self.slab.emplace(offload::HostSlabOptions{.bytes = window_bytes * options.paths.size()});
  base::Random random(1);
  const auto memory = self.slab->memory();
  for (std::size_t i = 0; i + 8 <= memory.size(); i += 8) {
    const std::uint64_t value = random.next();
    std::memcpy(memory.data() + i, &value, sizeof value);
  }
  std::string unregistered;
  for (const std::string& path : options.paths) {
    Implementation::Lane lane;
    lane.directory = path;
    try {
      self.directories.make(std::filesystem::path(path));
    } catch (const std::filesystem::filesystem_error& error) {
      throw IoError("cannot make the directory " + path + ": " + error.code().message());
    }
    lane.file = std::make_unique<NamelessFile>(path, options.bytes_per_path);
    self.direct = self.direct && lane.file->direct();
    lane.opened = io::open_storage(options.backend, {.block_bytes = options.block_bytes,
                                                     .queue_depth = options.queue_depth,
                                                     .wake = options.paths.size() == 1 ? nullptr : &self.wake});
    io::Storage& storage = *lane.opened.storage;
    lane.index = storage.add_file(lane.file->descriptor());
    if (options.block_bytes % storage.alignment_bytes() != 0)
      throw ConfigError("the block size " + base::format_size(options.block_bytes) + " is not a multiple of " +
                        std::to_string(storage.alignment_bytes()) + " bytes, which " + path + " asks for");
    std::byte* window = self.slab->take(path, window_bytes, 2 * base::kMiB);
    storage.register_memory({window, window_bytes}, &unregistered);
    lane.blocks = options.bytes_per_path / options.block_bytes;
    lane.operations.resize(options.queue_depth);
    for (std::uint32_t i = 0; i < options.queue_depth; ++i) lane.operations[i].data = window + i * options.block_bytes;
    self.lanes.push_back(std::move(lane));
  }
  self.finished.resize(options.queue_depth);
  self.again.reserve(options.queue_depth);
  self.memory_note =
      std::string(self.slab->page_kind()) + (unregistered.empty() ? "" : ", not registered: " + unregistered);
}

StorageBench::~StorageBench() = default;

StorageBench::Result StorageBench::prepare() {
  const Result result = implementation_->pass(Pattern::write);
  for (auto& lane : implementation_->lanes) lane.blocks = lane.next_block;
  return result;
}

StorageBench::Result StorageBench::run(Pattern pattern) {
  std::vector<std::uint64_t> whole;
  for (const auto& lane : implementation_->lanes) whole.push_back(lane.blocks);
  const Result result = implementation_->pass(pattern);
  for (std::size_t i = 0; i < whole.size(); ++i) implementation_->lanes[i].blocks = whole[i];
  return result;
}

double StorageBench::flush_seconds() {
  const Clock::time_point begin = Clock::now();
  for (const auto& lane : implementation_->lanes)
    if (::fdatasync(lane.file->descriptor()) != 0)
      throw IoError("cannot flush the file in " + lane.directory + ": " + std::strerror(errno));
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

std::string StorageBench::backend_name() const {
  return std::string(implementation_->lanes.front().opened.storage->name());
}
const std::string& StorageBench::backend_reason() const { return implementation_->lanes.front().opened.reason; }
bool StorageBench::direct() const { return implementation_->direct; }
const std::string& StorageBench::memory_note() const { return implementation_->memory_note; }

io::Backend backend_from(const std::string& name) {
  if (name == "auto") return io::Backend::automatic;
  if (name == "io_uring") return io::Backend::io_uring;
  if (name == "threads") return io::Backend::threads;
  throw ConfigError("the back end must be one of \"auto\", \"io_uring\", \"threads\", not \"" + name.substr(0, 60) +
                    "\"");
}

}  // namespace ballast::cli
