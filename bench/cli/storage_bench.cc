// Drives one storage per path from one thread, with a full queue of single blocks.
// SPDX-License-Identifier: Apache-2.0
#include "storage_bench.h"

#include <ballast/base/check.h>
#include <ballast/base/error.h>
#include <ballast/base/random.h>
#include <ballast/base/size.h>
#include <ballast/io/directories.h>
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
#include <utility>

#include "interrupt.h"

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

// A file open for raw transfers, direct where it can be: one of its own without a name, or one that is there.
class RawFile {
 public:
  static RawFile make(const std::string& directory, std::uint64_t bytes) {
    const std::string path = directory + "/.ballast-bench-" + std::to_string(::getpid());
    RawFile file(path, O_CREAT | O_EXCL, directory);
    ::unlink(path.c_str());
    const int error = ::posix_fallocate(file.descriptor_, 0, static_cast<off_t>(bytes));
    if (error == 0 || error == EOPNOTSUPP || error == EINVAL) return file;
    std::error_code unknown;
    const auto space = std::filesystem::space(directory, unknown);
    throw IoError("cannot reserve " + base::format_size(bytes) + " in " + directory + ": " + std::strerror(error) +
                  (unknown ? "" : " (" + base::format_size(space.available) + " free)"));
  }
  static RawFile open(const std::string& path) { return RawFile(path, 0, path); }
  RawFile(RawFile&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)), direct_(other.direct_) {}
  RawFile& operator=(RawFile&&) = delete;
  ~RawFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  int descriptor() const { return descriptor_; }
  bool direct() const { return direct_; }
  std::uint64_t bytes() const {
    struct stat status {};
    BALLAST_CHECK(::fstat(descriptor_, &status) == 0);
    return static_cast<std::uint64_t>(status.st_size);
  }

 private:
  RawFile(const std::string& path, int how, const std::string& place) {
    descriptor_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_DIRECT | how, 0600);
    if (descriptor_ < 0 && errno == EINVAL) {
      direct_ = false;
      if (how != 0) ::unlink(path.c_str());
      descriptor_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC | how, 0600);
    }
    if (const int error = errno; descriptor_ < 0)
      io::throw_path_error(
          error, (how != 0 ? "cannot make a file in " : "cannot open ") + place + ": " + std::strerror(error));
    struct statfs system {};
    // Memory takes "direct" requests too; it is no drive for that.
    if (::fstatfs(descriptor_, &system) == 0 && (system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC))
      direct_ = false;
  }

  int descriptor_ = -1;
  bool direct_ = true;
};

}  // namespace

struct StorageBench::Implementation {
  struct Lane {
    std::string name;
    std::optional<RawFile> file;
    std::vector<io::Operation> operations;  // the buffers; block b goes through b modulo their number
    std::vector<std::uint8_t> busy;
    io::OpenedStorage opened;  // drained before the operations and the file go
    std::uint32_t index = 0;
    std::uint64_t blocks = 0;  // that a pass covers
    std::uint64_t next_move = 0, end_move = 0;
  };

  StorageBenchOptions options;
  base::WakeEvent wake;
  io::MadeDirectories directories;
  std::optional<offload::HostSlab> slab;
  std::vector<Lane> lanes;  // destroyed before the memory that they transfer from
  std::vector<io::Operation*> finished, again;
  std::string memory_note;
  bool direct = true;

  ~Implementation() {
    lanes.clear();
    directories.remove_empty();
  }
  bool own_files() const { return options.files.empty(); }
  std::uint64_t stamp(const Lane& lane, std::uint64_t block) const {
    return base::random_at(static_cast<std::uint64_t>(&lane - lanes.data()), block);
  }
  void check(const Lane& lane, const io::Operation& operation) const {
    const std::string place = "in " + lane.name + " at offset " + std::to_string(operation.offset_bytes);
    if (operation.error_number != 0)
      throw IoError((operation.direction == io::Direction::read ? "cannot read " : "cannot write ") + place + ": " +
                    std::strerror(operation.error_number));
    if (operation.direction == io::Direction::write || !own_files()) return;
    std::uint64_t mark = 0;
    std::memcpy(&mark, operation.data, sizeof mark);
    if (mark != stamp(lane, operation.tag)) throw CorruptionError("the bytes read " + place + " are not those written");
  }
  // Submits what comes next, as far as the queue has room and the block's buffer is free.
  void fill(Lane& lane, const BlockOrder& order, Pattern pattern) {
    const std::size_t room = options.queue_depth - lane.opened.storage->outstanding();
    again.clear();
    while (again.size() < room && lane.next_move < lane.end_move) {
      const BlockOrder::Move move = order.at(lane.next_move);
      const std::size_t buffer = move.block % lane.operations.size();
      if (lane.busy[buffer] != 0) break;
      lane.busy[buffer] = 1;
      io::Operation& operation = lane.operations[buffer];
      operation.direction = move.write ? io::Direction::write : io::Direction::read;
      operation.file = lane.index;
      operation.offset_bytes = move.block * options.block_bytes;
      operation.bytes = options.block_bytes;
      operation.tag = move.block;
      if (move.write && pattern == Pattern::write) {
        const std::uint64_t mark = stamp(lane, move.block);
        std::memcpy(operation.data, &mark, sizeof mark);
      }
      again.push_back(&operation);
      ++lane.next_move;
    }
    if (!again.empty()) lane.opened.storage->submit(again);
  }
  // Takes what has finished on a lane. Returns how many.
  std::size_t collect(Lane& lane, bool wait, std::uint64_t* bytes) {
    const std::size_t count = lane.opened.storage->poll(finished, wait);
    for (std::size_t i = 0; i < count; ++i) {
      check(lane, *finished[i]);
      *bytes += finished[i]->bytes;
      lane.busy[static_cast<std::size_t>(finished[i] - lane.operations.data())] = 0;
    }
    return count;
  }
  Result pass(Pattern pattern, std::uint64_t parts = 1, const std::function<void()>& between = {}) {
    BALLAST_CHECK(pattern != Pattern::write || own_files());
    Result result;
    const double cpu_before = cpu_seconds_so_far();
    const Clock::time_point begin = Clock::now();
    const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
    std::vector<BlockOrder> orders;
    for (Lane& lane : lanes) {
      orders.emplace_back(pattern, lane.blocks, options.run_blocks, options.queue_depth);
      lane.next_move = 0;
    }
    for (std::uint64_t part = 1; part <= parts; ++part) {
      for (std::size_t i = 0; i < lanes.size(); ++i) {
        lanes[i].end_move = orders[i].moves() * part / parts;
        fill(lanes[i], orders[i], pattern);
      }
      move_all(orders, pattern, elapsed, &result.bytes);
      if (between) between();
    }
    result.seconds = elapsed();
    result.cpu_seconds = cpu_seconds_so_far() - cpu_before;
    return result;
  }
  // Until nothing is left of what the lanes have to move.
  template <class Elapsed>
  void move_all(const std::vector<BlockOrder>& orders, Pattern pattern, const Elapsed& elapsed, std::uint64_t* bytes) {
    for (bool busy = true; busy;) {
      InterruptGuard::check();
      busy = false;
      std::size_t count = 0;
      for (std::size_t i = 0; i < lanes.size(); ++i) {
        Lane& lane = lanes[i];
        if (lane.opened.storage->outstanding() == 0) continue;
        count += collect(lane, lanes.size() == 1, bytes);
        fill(lane, orders[i], pattern);
        busy = busy || lane.opened.storage->outstanding() > 0;
      }
      if (busy && count == 0) wake.wait(1000);
      if (options.pass_seconds_max > 0 && elapsed() > options.pass_seconds_max)
        for (Lane& lane : lanes) lane.end_move = std::min(lane.end_move, std::max<std::uint64_t>(lane.next_move, 1));
    }
  }
};

StorageBench::StorageBench(const StorageBenchOptions& options) : implementation_(std::make_unique<Implementation>()) {
  Implementation& self = *implementation_;
  self.options = options;
  BALLAST_CHECK(self.own_files() ? !options.paths.empty() && options.bytes_per_path >= options.block_bytes &&
                                       options.bytes_per_path % options.block_bytes == 0
                                 : options.paths.empty());
  const std::vector<std::string>& names = self.own_files() ? options.paths : options.files;
  const std::uint64_t buffers = BlockOrder::buffers(options.run_blocks, options.queue_depth);
  const std::uint64_t window_bytes = base::round_up(options.block_bytes * buffers, 2 * base::kMiB);
  if (window_bytes * names.size() > 8 * base::kGiB)
    throw ConfigError("block size times queue depth times paths needs " +
                      base::format_size(window_bytes * names.size()) + " of buffers; at most 8 GiB is sensible");
  self.slab.emplace(
      offload::HostSlabOptions{.bytes = window_bytes * names.size(), .check_interrupt = &InterruptGuard::check});
  base::Random random(1);
  const auto memory = self.slab->memory();
  for (std::size_t i = 0; i + 8 <= memory.size(); i += 8) {
    if (i % base::kMiB == 0) InterruptGuard::check();
    const std::uint64_t value = random.next();
    std::memcpy(memory.data() + i, &value, sizeof value);
  }
  std::string unregistered;
  for (const std::string& name : names) {
    Implementation::Lane lane;
    lane.name = name;
    if (self.own_files()) {
      self.directories.make(name);
      lane.file.emplace(RawFile::make(name, options.bytes_per_path));
    } else {
      lane.file.emplace(RawFile::open(name));
    }
    self.direct = self.direct && lane.file->direct();
    lane.opened = io::open_storage(options.backend, {.block_bytes = options.block_bytes,
                                                     .queue_depth = options.queue_depth,
                                                     .wake = names.size() == 1 ? nullptr : &self.wake});
    io::Storage& storage = *lane.opened.storage;
    lane.index = storage.add_file(lane.file->descriptor());
    if (options.block_bytes % storage.alignment_bytes() != 0)
      throw ConfigError("the block size " + base::format_size(options.block_bytes) + " is not a multiple of " +
                        std::to_string(storage.alignment_bytes()) + " bytes, which " + name + " asks for");
    std::byte* window = self.slab->take(name, window_bytes, 2 * base::kMiB);
    storage.register_memory({window, window_bytes}, &unregistered);
    lane.blocks = (self.own_files() ? options.bytes_per_path : lane.file->bytes()) / options.block_bytes;
    if (lane.blocks == 0)
      throw IoError(name + " is shorter than one block of " + base::format_size(options.block_bytes));
    lane.operations.resize(buffers);
    lane.busy.resize(buffers);
    for (std::uint64_t i = 0; i < buffers; ++i) lane.operations[i].data = window + i * options.block_bytes;
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
  for (auto& lane : implementation_->lanes) lane.blocks = lane.next_move;
  return result;
}

StorageBench::Result StorageBench::run(Pattern pattern, std::uint64_t parts, const std::function<void()>& between) {
  return implementation_->pass(pattern, parts, between);
}

double StorageBench::flush_seconds() {
  const Clock::time_point begin = Clock::now();
  for (const auto& lane : implementation_->lanes)
    if (::fdatasync(lane.file->descriptor()) != 0)
      throw IoError("cannot flush the file in " + lane.name + ": " + std::strerror(errno));
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

std::vector<std::string> StorageBench::open_files() const {
  std::vector<std::string> paths;
  for (const auto& lane : implementation_->lanes)
    paths.push_back("/proc/self/fd/" + std::to_string(lane.file->descriptor()));
  return paths;
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
