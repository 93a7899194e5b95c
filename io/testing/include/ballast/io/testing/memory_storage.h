// MemoryStorage: a Storage whose files are memory, and whose operations finish when and in the order a test says.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/base/random.h>
#include <ballast/io/storage.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace ballast::io::testing {

struct MemoryStorageOptions {
  std::uint64_t alignment_bytes = 512;
  // False: each poll finishes one operation in flight, chosen by the seed (seed 0: the oldest). True: operations finish
  // by finish() only, except that a waiting poll finishes the oldest rather than wait for ever.
  bool manual = false;
  std::uint64_t seed = 0;
};

// Operations are not cut into blocks; queue_depth of them are in flight at most. One thread at a time.
class MemoryStorage final : public Storage {
 public:
  MemoryStorage(const StorageOptions& options, const MemoryStorageOptions& memory_options);
  ~MemoryStorage() override;

  // The descriptor may be -1. Otherwise the file begins as long as the real one, and as zeros, and may be
  // read and written as that one may, which is not touched.
  std::uint32_t add_file(int descriptor) override;
  bool register_memory(std::span<std::byte>, std::string*) override { return true; }
  void submit(std::span<Operation* const> operations) override;
  std::size_t poll(std::span<Operation*> finished, bool wait) override;
  void cancel(Operation& operation) override;
  int flush(std::uint32_t file) override { return file < files_.size() ? 0 : EBADF; }
  std::size_t outstanding() const override;
  std::uint64_t alignment_bytes() const override { return memory_options_.alignment_bytes; }
  std::string_view name() const override { return "memory"; }
  const StorageCounters& counters() const override { return counters_; }

  // Operations in flight, oldest first.
  std::vector<const Operation*> in_flight() const;
  // Ends the index-th of them: moves its bytes, or (error_number) none.
  void finish(std::size_t index, int error_number = 0);
  // Bytes as they lie in a file, zeros where nothing was written.
  std::vector<std::byte> contents(std::uint32_t file, std::uint64_t offset_bytes, std::uint64_t bytes) const;

 private:
  static constexpr std::uint64_t kPageBytes = 64 << 10;
  struct File {
    std::map<std::uint64_t, std::vector<std::byte>> pages;  // by number; sparse
    std::uint64_t bytes = 0;
    bool readable = true;
    bool writable = true;
  };
  struct Queue;  // PieceQueue, which is private to io

  void start();
  void read(const File& file, std::uint64_t offset, std::byte* data, std::uint64_t bytes) const;
  void write(File& file, std::uint64_t offset, const std::byte* data, std::uint64_t bytes);

  base::WakeEvent* wake_;
  MemoryStorageOptions memory_options_;
  std::uint32_t queue_depth_;
  base::Random random_;
  std::unique_ptr<Queue> queue_;
  std::vector<File> files_;
  StorageCounters counters_;
};

}  // namespace ballast::io::testing
