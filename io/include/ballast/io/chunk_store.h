// ChunkStore: chunks of model states on durable storage. Each chunk is one aligned extent, in one or two slots (the
// second for copy on write), striped over paths, one storage per path. It knows nothing of what the bytes mean.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/io/open_storage.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace ballast::io {

struct ChunkStoreOptions {
  std::vector<std::string> paths;  // directories, made where missing
  Backend backend = Backend::automatic;
  StorageOptions storage;
  std::uint32_t rank = 0;                  // part of the file name
  std::uint32_t slots_per_chunk = 1;       // 1, or 2 for durable steps
  std::vector<std::uint64_t> chunk_bytes;  // logical length of each chunk's extent; 0 where a chunk is not stored
  // Chunks from this one on are scratch: one slot each, behind all others, of no meaning to a later run, whose scratch
  // may be laid out otherwise.
  std::size_t lasting_chunks = SIZE_MAX;
  // Of this run; goes into the header. A file that carries the same one and the same layout keeps its contents, any
  // other is emptied first. All zeros: a run without identity, never the same as another.
  std::array<std::uint8_t, 16> run_identity{};
  bool keep_on_close = false;  // false: the file is removed at a normal close
  // The files are there, with this run's identity and this layout, and keep their contents; IoError where they are not.
  bool must_exist = false;
  int lock_wait_ms = 10'000;
  std::function<void(std::string)> note;  // one-line notes for people (back end, buffered I/O, leftovers); may be empty
  // For tests and decorators: makes the storage of a path instead of open_storage().
  std::function<OpenedStorage(Backend, const StorageOptions&, const std::string& path)> storage_factory;
};

// A transfer between a range of one chunk's extent and memory. Owned by the caller until handed back by poll().
// begin_bytes and bytes are multiples of ChunkStore::alignment_bytes(), as is the address of data.
struct Transfer {
  Direction direction = Direction::read;
  Priority priority = Priority::high;
  std::uint32_t chunk = 0;
  std::uint32_t slot = 0;
  std::uint64_t begin_bytes = 0;
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
  std::uint64_t tag = 0;
  int error_number = 0;  // valid when handed back

  Operation operation;  // the store's own
};

class ChunkStore {
 public:
  // Opens or makes the files, takes the lock (waiting lock_wait_ms for a dying holder), writes the header and reserves
  // all space. Throws IoError naming the directory with wanted and free bytes (disk full), the holder of the lock, or
  // the reason why a path is unusable. On failure it removes what it made.
  explicit ChunkStore(ChunkStoreOptions options);
  // Cancels, drains, closes; removes its files unless keep_on_close.
  ~ChunkStore();
  ChunkStore(const ChunkStore&) = delete;
  ChunkStore& operator=(const ChunkStore&) = delete;

  // The alignment that paths would ask for, before any store exists (directories are probed by a real direct write and
  // read). At least 512. Throws IoError for an unusable path. Directories that it had to make are removed again.
  static std::uint64_t probe_alignment_bytes(const std::vector<std::string>& paths);

  // What a rank's chunk file in a path says of itself. Any time; nothing where there is none that is whole.
  struct StoredPlace {
    std::uint32_t path_index = 0, path_count = 0;  // among its run's paths
    std::uint32_t slots_per_chunk = 0;
  };
  static std::optional<StoredPlace> stored_place(const std::string& path, std::uint32_t rank);

  bool register_memory(std::span<std::byte> memory, std::string* reason);
  void submit(std::span<Transfer* const> transfers);
  std::size_t poll(std::span<Transfer*> finished, bool wait);
  std::size_t outstanding() const;
  // Makes durable what was written by transfers that poll() had handed back before this call. Blocks; any thread.
  // Throws IoError naming the file; what was written may be lost then.
  void flush();

  std::uint64_t alignment_bytes() const;
  std::string_view backend_name() const;  // "io_uring" or "threads"
  std::string backend_reason() const;
  bool direct() const;               // false where a path only allows buffered I/O
  StorageCounters counters() const;  // summed over paths
  std::uint64_t reserved_bytes() const;
  std::vector<std::string> files() const;  // one per path
  // Where a chunk's extents are, for readers of the files: in that of path chunk % paths, slot after slot.
  std::uint64_t offset_bytes(std::uint32_t chunk) const;
  std::uint64_t slot_bytes(std::uint32_t chunk) const;
  static std::string file_name(std::uint32_t rank);  // within each path
  // "FILE at OFFSET": where a transfer goes, for error texts.
  std::string describe(const Transfer& transfer) const;

 private:
  struct Implementation;
  std::unique_ptr<Implementation> implementation_;
};

}  // namespace ballast::io
