// Files that a crash leaves as they may be left.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/base/error.h>
#include <ballast/io/testing/crash_disk.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>

namespace ballast::io::testing {
namespace {

void put(std::vector<std::byte>& file, std::uint64_t offset, const std::byte* data, std::uint64_t bytes) {
  if (file.size() < offset + bytes) file.resize(offset + bytes);
  std::memcpy(file.data() + offset, data, bytes);
}

}  // namespace

// Operations end in an order of the disk's choosing, each at a poll.
class CrashStorage final : public Storage {
 public:
  CrashStorage(CrashDisk& disk, const StorageOptions& options, std::string file)
      : disk_(disk), wake_(options.wake), name_(std::move(file)) {}

  std::uint32_t add_file(int descriptor) override {
    struct stat status;
    BALLAST_CHECK(::fstat(descriptor, &status) == 0);
    const std::lock_guard lock(disk_.mutex_);
    CrashDisk::File& file = disk_.files_[name_];
    const auto bytes = static_cast<std::size_t>(status.st_size);
    file.durable.resize(std::max(file.durable.size(), bytes));
    file.seen.resize(std::max(file.seen.size(), bytes));
    return 0;
  }
  bool register_memory(std::span<std::byte>, std::string*) override { return true; }

  void submit(std::span<Operation* const> operations) override {
    const std::lock_guard lock(disk_.mutex_);
    for (Operation* const operation : operations) {
      operation->state = OperationState::in_flight;
      operation->error_number = 0;
      operation->transferred_bytes = 0;
      std::uint64_t id = 0;
      if (operation->direction == Direction::write && disk_.step()) {
        id = ++disk_.next_id_;
        disk_.files_[name_].writes.push_back(
            {operation->offset_bytes, {operation->data, operation->data + operation->bytes}, false, id});
      }
      queue_.push_back({operation, id});
    }
    if (wake_ != nullptr && !operations.empty()) wake_->notify();
  }

  std::size_t poll(std::span<Operation*> finished, bool) override {
    const std::lock_guard lock(disk_.mutex_);
    std::size_t count = 0;
    if (!queue_.empty() && count < finished.size()) {
      const std::size_t which = disk_.random_.below(queue_.size());
      const Queued queued = queue_[which];
      queue_.erase(queue_.begin() + static_cast<std::ptrdiff_t>(which));
      carry_out(*queued.operation, queued.id);
      finished[count++] = queued.operation;
    }
    if (!queue_.empty() && wake_ != nullptr) wake_->notify();
    return count;
  }

  void cancel(Operation&) override {}  // ends by itself

  int flush(std::uint32_t) override {
    const std::lock_guard lock(disk_.mutex_);
    if (!disk_.step()) return EIO;
    if (disk_.careless_.no_data_flush) return 0;
    CrashDisk::File& file = disk_.files_[name_];
    for (const CrashDisk::Write& write : file.writes) {
      if (write.finished) put(file.durable, write.offset_bytes, write.data.data(), write.data.size());
    }
    std::erase_if(file.writes, [](const CrashDisk::Write& write) { return write.finished; });
    return 0;
  }

  std::size_t outstanding() const override { return queue_.size(); }
  std::uint64_t alignment_bytes() const override { return CrashDisk::kSectorBytes; }
  std::string_view name() const override { return "crash disk"; }
  const StorageCounters& counters() const override { return counters_; }

 private:
  struct Queued {
    Operation* operation;
    std::uint64_t id;  // of its write
  };

  void carry_out(Operation& operation, std::uint64_t id) {
    operation.state = OperationState::done;
    if (disk_.crashed_) {
      operation.error_number = EIO;
      return;
    }
    CrashDisk::File& file = disk_.files_[name_];
    if (operation.direction == Direction::write) {
      put(file.seen, operation.offset_bytes, operation.data, operation.bytes);
      for (CrashDisk::Write& write : file.writes) write.finished |= write.id == id;
      counters_.written_bytes += operation.bytes;
      ++counters_.write_requests;
    } else {
      if (operation.offset_bytes + operation.bytes > file.seen.size()) {
        operation.error_number = ENODATA;
        return;
      }
      std::memcpy(operation.data, file.seen.data() + operation.offset_bytes, operation.bytes);
      counters_.read_bytes += operation.bytes;
      ++counters_.read_requests;
    }
    operation.transferred_bytes = operation.bytes;
  }

  CrashDisk& disk_;
  base::WakeEvent* const wake_;
  const std::string name_;
  std::vector<Queued> queue_;
  StorageCounters counters_;
};

class CrashSmallFiles final : public SmallFiles {
 public:
  explicit CrashSmallFiles(CrashDisk& disk) : disk_(disk) {}

  std::vector<std::string> list() override {
    const std::lock_guard lock(disk_.mutex_);
    std::vector<std::string> names;
    for (const auto& [name, file] : disk_.small_) names.push_back(name);
    return names;
  }
  std::vector<std::byte> read(const std::string& name) override {
    const std::lock_guard lock(disk_.mutex_);
    const auto found = disk_.small_.find(name);
    if (found == disk_.small_.end()) throw IoError(path(name) + " is not there");
    return found->second->bytes;
  }
  void write(const std::string& name, std::span<const std::byte> bytes) override {
    const std::lock_guard lock(disk_.mutex_);
    step(name);
    auto file = std::make_shared<CrashDisk::Small>();
    file->bytes.assign(bytes.begin(), bytes.end());
    disk_.small_[placed(name)] = std::move(file);
    changed();
  }
  void flush(const std::string& name) override {
    const std::lock_guard lock(disk_.mutex_);
    step(name);
    if (!disk_.careless_.no_small_flush) disk_.small_.at(placed(name))->flushed = true;
  }
  void rename(const std::string& from, const std::string& to) override {
    const std::lock_guard lock(disk_.mutex_);
    step(from);
    if (disk_.careless_.no_rename || disk_.careless_.lost_rename) return;
    disk_.small_[to] = disk_.small_.at(from);
    disk_.small_.erase(from);
    changed();
  }
  void flush_directory() override {
    const std::lock_guard lock(disk_.mutex_);
    step("");
    if (!disk_.careless_.no_small_flush) disk_.small_possible_.assign(1, disk_.small_);
  }
  void remove(const std::string& name) override {
    const std::lock_guard lock(disk_.mutex_);
    step(name);
    disk_.small_.erase(name);
    changed();
  }
  std::string path(const std::string& name) const override { return "crash disk/" + name; }

 private:
  void step(const std::string& name) {
    if (!disk_.step()) throw IoError(path(name) + ": EIO, the power is gone");
  }
  std::string placed(const std::string& name) const {
    const std::string suffix = kUnpublishedSuffix;
    return disk_.careless_.no_rename && name.ends_with(suffix) ? name.substr(0, name.size() - suffix.size()) : name;
  }
  void changed() {
    if (disk_.small_possible_.empty()) disk_.small_possible_.emplace_back();  // the empty directory at the beginning
    disk_.small_possible_.push_back(disk_.small_);
  }

  CrashDisk& disk_;
};

std::unique_ptr<Storage> CrashDisk::storage(const StorageOptions& options, const std::string& file) {
  return std::make_unique<CrashStorage>(*this, options, file);
}

std::shared_ptr<SmallFiles> CrashDisk::small_files() { return std::make_shared<CrashSmallFiles>(*this); }

void CrashDisk::crash_after(std::uint64_t steps) {
  const std::lock_guard lock(mutex_);
  crash_at_ = steps_ + steps;
}

bool CrashDisk::crashed() const {
  const std::lock_guard lock(mutex_);
  return crashed_;
}

std::uint64_t CrashDisk::steps() const {
  const std::lock_guard lock(mutex_);
  return steps_;
}

// The step at which the power goes may have begun.
bool CrashDisk::step() {
  if (crashed_) return false;
  if (crash_at_ && steps_ >= *crash_at_) {
    crash();
    return false;
  }
  ++steps_;
  return true;
}

void CrashDisk::crash() {
  crashed_ = true;
  for (auto& [name, file] : files_) {
    // In any order, each sector of each or not.
    for (std::size_t i = file.writes.size(); i > 1; --i) std::swap(file.writes[i - 1], file.writes[random_.below(i)]);
    for (const Write& write : file.writes) {
      const std::uint64_t kind = random_.below(4);  // lost, whole, torn
      if (kind == 0) continue;
      for (std::uint64_t at = 0; at < write.data.size(); at += kSectorBytes) {
        if (kind > 1 && random_.below(2) == 0) continue;
        put(file.durable, write.offset_bytes + at, write.data.data() + at,
            std::min<std::uint64_t>(kSectorBytes, write.data.size() - at));
      }
    }
    file.writes.clear();
    file.seen = file.durable;
  }
  if (!small_possible_.empty()) small_ = small_possible_[random_.below(small_possible_.size())];
  for (auto& [name, file] : small_) {
    if (!file->flushed) {
      file = std::make_shared<Small>(*file);
      file->bytes.resize(random_.below(file->bytes.size() + 1));
      file->flushed = true;
    }
  }
  small_possible_.assign(1, small_);
}

void CrashDisk::restart() {
  const std::lock_guard lock(mutex_);
  if (!crashed_) crash();
  crashed_ = false;
  crash_at_.reset();
}

void CrashDisk::damage() {
  const std::lock_guard lock(mutex_);
  if (files_.empty()) return;
  File& file = std::next(files_.begin(), static_cast<std::ptrdiff_t>(random_.below(files_.size())))->second;
  if (file.durable.empty()) return;
  const std::uint64_t at = random_.below(file.durable.size());
  const auto bit = static_cast<std::byte>(1U << random_.below(8));
  file.durable[at] ^= bit;
  file.seen[at] ^= bit;
}

}  // namespace ballast::io::testing
