// CrashDisk: files that live through the death of the process and of the machine, as far as they were made durable. Of
// what was written and not flushed a crash keeps any part, torn at any sector; of a small file that was not flushed any
// beginning; of names that were changed and whose directory was not flushed the change or not.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/base/random.h>
#include <ballast/io/small_files.h>
#include <ballast/io/storage.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace ballast::io::testing {

// What a driver, a file system or a careless engine gets wrong: for tests that must see the harness notice.
struct Carelessness {
  bool no_data_flush = false;   // flushes of chunk files do nothing
  bool no_small_flush = false;  // those of small files do nothing
  bool no_rename = false;       // small files are written in place
  bool lost_rename = false;     // they keep the name that they were written under
};

// Thread-safe. Outlives the storages and small files that it hands out.
class CrashDisk {
 public:
  explicit CrashDisk(std::uint64_t seed, Carelessness careless = {}) : random_(seed), careless_(careless) {}

  // One file each, by name; contents are found again by later storages of that name.
  std::unique_ptr<Storage> storage(const StorageOptions& options, const std::string& file);
  std::shared_ptr<SmallFiles> small_files();

  // The power goes when this many more steps (writes, flushes, renames, ...) have been begun. From then on everything
  // fails with EIO.
  void crash_after(std::uint64_t steps);
  bool crashed() const;
  std::uint64_t steps() const;  // begun so far
  // What is left is what the next process finds.
  void restart();
  // Flips a bit of what is durable in one of the chunk files, anywhere. After restart().
  void damage();

 private:
  friend class CrashStorage;
  friend class CrashSmallFiles;
  static constexpr std::uint64_t kSectorBytes = 512;
  struct Write {
    std::uint64_t offset_bytes = 0;
    std::vector<std::byte> data;
    bool finished = false;  // handed back: a flush covers it
    std::uint64_t id = 0;
  };
  struct File {
    std::vector<std::byte> durable, seen;  // as after a crash, and as reads see it
    std::vector<Write> writes;             // not durable, in order
  };
  struct Small {
    std::vector<std::byte> bytes;
    bool flushed = false;
  };
  using Directory = std::map<std::string, std::shared_ptr<Small>>;

  bool step();  // false: the power is gone
  void crash();

  mutable std::mutex mutex_;
  base::Random random_;
  const Carelessness careless_;
  std::uint64_t steps_ = 0;
  std::optional<std::uint64_t> crash_at_;
  bool crashed_ = false;
  std::uint64_t next_id_ = 0;
  std::map<std::string, File> files_;
  Directory small_;                        // as seen
  std::vector<Directory> small_possible_;  // as a crash may leave the names: the last durable one and each after it
};

}  // namespace ballast::io::testing
