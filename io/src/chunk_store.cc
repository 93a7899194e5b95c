// ChunkStore: extents of chunks over the files of all paths.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/base/error.h>
#include <ballast/base/size.h>
#include <ballast/io/chunk_store.h>
#include <ballast/io/directories.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>
#include <optional>

#include "chunk_file.h"
#include "errno_text.h"

namespace ballast::io {
namespace {

constexpr std::array<std::uint8_t, 16> kNoIdentity{};

std::string file_path(const std::string& directory, std::uint32_t rank) {
  return directory + "/" + ChunkStore::file_name(rank);
}

std::string hexadecimal(const std::array<std::uint8_t, 16>& bytes) {
  std::string text;
  for (const std::uint8_t byte : bytes) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", byte);
    text += digits;
  }
  return text;
}

}  // namespace

struct ChunkStore::Implementation {
  struct Path {
    std::string directory;
    std::unique_ptr<ChunkFile> file;
    std::unique_ptr<Storage> storage;
    std::uint32_t storage_file = 0;
    std::uint64_t bytes = 0;
    std::uint64_t lasting_bytes = 0;  // without scratch
  };
  struct Extent {
    std::uint64_t offset_bytes = 0;  // of slot 0; the other follows
    std::uint64_t bytes = 0;         // of one slot, padded
  };

  explicit Implementation(ChunkStoreOptions given);
  ~Implementation();

  void check();
  void lay_out(std::uint64_t extent_alignment);
  void check_space();
  void prepare_files();
  void open_storages();
  std::span<const std::uint64_t> lasting() const {
    return std::span(options.chunk_bytes).first(std::min(options.lasting_chunks, options.chunk_bytes.size()));
  }
  std::uint32_t slots(std::size_t chunk) const { return chunk < options.lasting_chunks ? options.slots_per_chunk : 1; }
  void note(const std::string& text) const {
    if (options.note) options.note(text);
  }
  ChunkFileHeader header(std::uint32_t path, std::uint64_t owner) const;
  std::uint64_t offset_bytes(const Transfer& transfer) const;
  std::size_t poll_paths(std::span<Transfer*> finished, bool wait);

  ChunkStoreOptions options;
  std::optional<base::WakeEvent> own_wake;  // where several paths are waited for and the caller brought none
  MadeDirectories directories;
  std::vector<Path> paths;
  std::vector<Extent> extents;                   // by chunk
  static constexpr std::size_t kBatch = 64;      // at once, so that submit never allocates
  std::vector<std::vector<Operation*>> batches;  // by path, for submit
  std::uint64_t alignment = kUsualAlignmentBytes;
  std::uint64_t geometry = 0;
  std::size_t next_path = 0;  // polled first, in turn
  bool direct = true;
  std::string reason;
};

ChunkStore::Implementation::Implementation(ChunkStoreOptions given) : options(std::move(given)) {
  // The working directory may be another one when files and directories are removed.
  for (std::string& path : options.paths) {
    std::error_code unknown;
    const std::filesystem::path whole = std::filesystem::absolute(path, unknown);
    if (!path.empty() && !unknown) path = whole.string();
  }
  check();
  try {
    prepare_files();
    open_storages();
  } catch (...) {
    for (Path& path : paths) {
      path.storage.reset();
      if (path.file != nullptr && path.file->made()) path.file->remove_at_close();
      path.file.reset();
    }
    directories.remove_empty();
    throw;
  }
}

ChunkStore::Implementation::~Implementation() {
  const bool here = std::all_of(paths.begin(), paths.end(), [](const Path& path) { return path.file->owned_here(); });
  for (std::uint32_t i = 0; i < paths.size(); ++i) {
    paths[i].storage.reset();  // nothing moves any more
    if (here && options.keep_on_close) {
      try {
        paths[i].file->write_header(header(i, 0));
      } catch (const std::exception& error) {
        // The header still names this process, which is how an unfinished run looks; the chunks are whole.
        try {
          note(error.what());
        } catch (...) {
        }
      }
    }
    paths[i].file.reset();
  }
  if (here && !options.keep_on_close) directories.remove_empty();
}

void ChunkStore::Implementation::check() {
  if (options.paths.empty()) throw ConfigError("no storage path is given: name at least one directory");
  if (options.slots_per_chunk < 1 || options.slots_per_chunk > 2) {
    throw ConfigError("slots per chunk is " + std::to_string(options.slots_per_chunk) + ": 1 or 2 are possible");
  }
  std::uint64_t total = kHeaderBytes;
  for (const std::uint64_t bytes : options.chunk_bytes) {
    // Far below where sums of padded lengths could overflow.
    if (bytes > (std::uint64_t{1} << 60) || (total += bytes) > (std::uint64_t{1} << 60)) {
      throw ConfigError("chunks of more than 1 EiB cannot be stored");
    }
  }
  if (options.chunk_bytes.size() > UINT32_MAX) throw ConfigError("more chunks than a chunk number can name");
  geometry = geometry_checksum(lasting());
}

void ChunkStore::Implementation::lay_out(std::uint64_t extent_alignment) {
  extents.assign(options.chunk_bytes.size(), {});
  for (Path& path : paths) path.bytes = path.lasting_bytes = std::max(kHeaderBytes, extent_alignment);
  for (std::size_t chunk = 0; chunk < extents.size(); ++chunk) {
    Path& path = paths[chunk % paths.size()];
    extents[chunk] = {path.bytes, base::round_up(options.chunk_bytes[chunk], extent_alignment)};
    path.bytes += extents[chunk].bytes * slots(chunk);
    if (chunk < options.lasting_chunks) path.lasting_bytes = path.bytes;
  }
}

// Before anything is made or changed: what all paths of one file system want together, against what it has.
void ChunkStore::Implementation::check_space() {
  struct Need {
    std::uint64_t wanted = 0;
    std::uint64_t available = 0;
    std::string directories;
  };
  std::map<dev_t, Need> needs;
  for (const Path& path : paths) {
    struct stat status;
    if (::stat(path.directory.c_str(), &status) != 0) throw IoError("storage path " + path.directory + " has vanished");
    Need& need = needs[status.st_dev];
    if (need.directories.empty()) need.available = free_bytes(path.directory);
    need.directories += (need.directories.empty() ? "" : ", ") + path.directory;
    need.wanted += path.bytes;
    const std::string name = file_path(path.directory, options.rank);
    if (::stat(name.c_str(), &status) == 0) need.available += static_cast<std::uint64_t>(status.st_blocks) * 512;
  }
  for (const auto& [device, need] : needs) {
    if (need.wanted > need.available) {
      throw IoError("not enough space in " + need.directories + ": wanted " + base::format_size(need.wanted) +
                    ", free " + base::format_size(need.available) +
                    "; free some, name another path, or lower what is stored");
    }
  }
}

ChunkFileHeader ChunkStore::Implementation::header(std::uint32_t path, std::uint64_t owner) const {
  ChunkFileHeader made;
  made.run_identity = options.run_identity;
  made.owner_process = owner;
  made.rank = options.rank;
  made.path_index = path;
  made.path_count = static_cast<std::uint32_t>(paths.size());
  made.slots_per_chunk = options.slots_per_chunk;
  made.chunk_count = lasting().size();
  made.alignment_bytes = alignment;
  made.file_bytes = paths[path].lasting_bytes;
  made.geometry_checksum = geometry;
  return made;
}

void ChunkStore::Implementation::prepare_files() {
  std::map<std::pair<dev_t, ino_t>, std::string> seen;
  for (const std::string& directory : options.paths) {
    directories.make(directory);
    struct stat status;
    if (::stat(directory.c_str(), &status) != 0) throw IoError("storage path " + directory + " has vanished");
    const auto [place, fresh] = seen.emplace(std::pair(status.st_dev, status.st_ino), directory);
    if (!fresh)
      throw ConfigError("storage paths " + place->second + " and " + directory +
                        " are the same directory; name each once");
    paths.push_back({directory, nullptr, nullptr});
  }
  lay_out(alignment);
  check_space();
  for (Path& path : paths)
    path.file = std::make_unique<ChunkFile>(file_path(path.directory, options.rank), options.lock_wait_ms);

  // The alignment is known once all files are probed, and each file's layout only then: the first header is rewritten.
  const auto refuse = [](const ChunkFile& file, const std::string& more) {
    throw IoError("chunk file " + file.path() + " is not the one that the committed steps there belong to" + more +
                  "; put back the files of the run, or start anew");
  };
  std::vector<bool> current(paths.size());
  const auto owner = static_cast<std::uint64_t>(::getpid());
  for (std::uint32_t i = 0; i < paths.size(); ++i) {
    ChunkFile& file = *paths[i].file;
    // A run without an identity is never taken for another one.
    current[i] = file.has_old_header() && file.old_header().run_identity == options.run_identity &&
                 options.run_identity != kNoIdentity;
    if (options.must_exist && !current[i]) refuse(file, "");
    if (file.has_old_header() && !current[i]) {
      note("storage path " + paths[i].directory + " holds chunks of another run (" +
           hexadecimal(file.old_header().run_identity) + "); its file is used again, nothing in it is read");
    } else if (!file.has_old_header() && !file.old_header_problem().empty()) {
      note("storage path " + paths[i].directory + ": the chunk file there is not usable, as " +
           file.old_header_problem() + "; it is replaced");
    }
    std::string why;
    file.choose_mode(encode_header(current[i] ? file.old_header() : header(i, owner)), &why);
    if (!file.direct()) {
      direct = false;
      note("storage path " + paths[i].directory + " allows no direct I/O (" + why +
           "); buffered I/O is used, which costs memory and time");
    }
    alignment = std::max(alignment, file.alignment_bytes());
  }
  lay_out(alignment);
  for (std::uint32_t i = 0; i < paths.size(); ++i) {
    ChunkFile& file = *paths[i].file;
    const bool keep_contents = current[i] && file.old_header().same_contents(header(i, owner));
    if (options.must_exist && !keep_contents) refuse(file, ", or is laid out otherwise");
    if (current[i] && !keep_contents) {
      note("storage path " + paths[i].directory + " holds chunks of this run in another layout; they are dropped");
    }
    file.reserve(paths[i].bytes, !keep_contents, [this](const std::string& text) { note(text); });
    file.write_header(header(i, owner));
  }
}

void ChunkStore::Implementation::open_storages() {
  StorageOptions storage_options = options.storage;
  if (storage_options.wake == nullptr && paths.size() > 1) {
    own_wake.emplace();
    storage_options.wake = &*own_wake;
  }
  for (Path& path : paths) {
    OpenedStorage opened = options.storage_factory
                               ? options.storage_factory(options.backend, storage_options, path.directory)
                               : open_storage(options.backend, storage_options);
    path.storage = std::move(opened.storage);
    if (reason != opened.reason) {
      reason = std::move(opened.reason);
      note("storage back end: " + reason);
    }
    path.storage_file = path.storage->add_file(path.file->descriptor());
    BALLAST_CHECK(alignment % path.storage->alignment_bytes() == 0);
    if (!options.keep_on_close) {
      path.file->remove_at_close();
    } else {
      path.file->keep();
    }
  }
  batches.resize(paths.size());
  for (auto& batch : batches) batch.reserve(kBatch);
}

std::uint64_t ChunkStore::Implementation::offset_bytes(const Transfer& transfer) const {
  const Extent& extent = extents[transfer.chunk];
  return extent.offset_bytes + transfer.slot * extent.bytes + transfer.begin_bytes;
}

std::size_t ChunkStore::Implementation::poll_paths(std::span<Transfer*> finished, bool wait) {
  std::array<Operation*, 64> operations;
  std::size_t count = 0;
  for (std::size_t i = 0; i < paths.size() && count < finished.size(); ++i) {
    Storage& storage = *paths[(next_path + i) % paths.size()].storage;
    const std::size_t room = std::min(operations.size(), finished.size() - count);
    const std::size_t got = storage.poll(std::span(operations).first(room), wait && paths.size() == 1);
    for (std::size_t k = 0; k < got; ++k) {
      auto* const transfer = reinterpret_cast<Transfer*>(static_cast<std::uintptr_t>(operations[k]->tag));
      transfer->error_number = operations[k]->error_number;
      finished[count++] = transfer;
    }
  }
  next_path = (next_path + 1) % paths.size();
  return count;
}

ChunkStore::ChunkStore(ChunkStoreOptions options)
    : implementation_(std::make_unique<Implementation>(std::move(options))) {}
ChunkStore::~ChunkStore() = default;

namespace {

constexpr int kProbeWaitMs = 10'000;

// Probes that were killed have left their files, which nobody holds. Whose file goes before it is locked makes another.
void remove_old_probes(const std::string& directory) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(directory, error)) {
    const std::string path = entry.path().string();
    if (!entry.path().filename().string().starts_with("ballast-probe-")) continue;
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (descriptor < 0) continue;
    if (::flock(descriptor, LOCK_EX | LOCK_NB) == 0) ::unlink(path.c_str());
    ::close(descriptor);
  }
}

}  // namespace

std::uint64_t ChunkStore::probe_alignment_bytes(const std::vector<std::string>& paths) {
  std::uint64_t alignment = kUsualAlignmentBytes;
  MadeDirectories directories;
  try {
    for (const std::string& directory : paths) {
      // A name that no store and no other probe uses.
      static std::atomic<unsigned> count{0};
      const std::string name =
          directory + "/ballast-probe-" + std::to_string(::getpid()) + "-" + std::to_string(++count);
      // Another rank that probes the same directory may have made it, and remove it again before we are in; and yet
      // another may have made it anew by the time we look.
      remove_old_probes(directory);
      std::optional<ChunkFile> opened;
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(kProbeWaitMs);
      for (int tries = 0; !opened; ++tries) {
        directories.make(directory);
        try {
          opened.emplace(name, kProbeWaitMs);  // others look whether it is left over, and may hold it meanwhile
        } catch (const IoError&) {
          if (tries == 100 || std::chrono::steady_clock::now() >= deadline) throw;
        }
      }
      ChunkFile& file = *opened;
      file.remove_at_close();
      std::string reason;
      file.choose_mode(HeaderBlock{}, &reason);
      alignment = std::max(alignment, file.alignment_bytes());
    }
  } catch (...) {
    directories.remove_empty();
    throw;
  }
  directories.remove_empty();
  return alignment;
}

std::optional<ChunkStore::StoredPlace> ChunkStore::stored_place(const std::string& path, std::uint32_t rank) {
  const std::string name = file_path(path, rank);
  const int descriptor = ::open(name.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
  if (descriptor < 0) return std::nullopt;
  HeaderBlock block;
  const ssize_t got = ::pread(descriptor, block.data(), block.size(), 0);
  ::close(descriptor);
  ChunkFileHeader header;
  std::string reason;
  if (got < 0 || !decode_header(std::span(block).first(static_cast<std::size_t>(got)), &header, &reason)) {
    return std::nullopt;
  }
  return StoredPlace{header.path_index, header.path_count, header.slots_per_chunk};
}

bool ChunkStore::register_memory(std::span<std::byte> memory, std::string* reason) {
  for (Implementation::Path& path : implementation_->paths) {
    if (!path.storage->register_memory(memory, reason)) return false;
  }
  return true;
}

void ChunkStore::submit(std::span<Transfer* const> transfers) {
  Implementation& store = *implementation_;
  for (const Transfer* const transfer : transfers) {  // all or none
    const bool exists = transfer->chunk < store.extents.size() && transfer->slot < store.slots(transfer->chunk);
    const std::uint64_t length = exists ? store.extents[transfer->chunk].bytes : 0;
    if (!exists || transfer->begin_bytes > length || transfer->bytes > length - transfer->begin_bytes) {
      throw UsageError("a transfer of " + std::to_string(transfer->bytes) + " bytes at " +
                       std::to_string(transfer->begin_bytes) + " is outside chunk " + std::to_string(transfer->chunk) +
                       " slot " + std::to_string(transfer->slot) + ", which has " + std::to_string(length) + " bytes");
    }
    if ((transfer->begin_bytes | transfer->bytes | reinterpret_cast<std::uintptr_t>(transfer->data)) %
            store.alignment !=
        0) {
      throw UsageError("a transfer of " + std::to_string(transfer->bytes) + " bytes at " +
                       std::to_string(transfer->begin_bytes) + " of chunk " + std::to_string(transfer->chunk) +
                       " or its memory is not aligned to " + std::to_string(store.alignment) + " bytes");
    }
  }
  for (auto& batch : store.batches) batch.clear();
  for (Transfer* const transfer : transfers) {
    const std::size_t path = transfer->chunk % store.paths.size();
    Operation& operation = transfer->operation;
    operation.direction = transfer->direction;
    operation.priority = transfer->priority;
    operation.file = store.paths[path].storage_file;
    operation.offset_bytes = store.offset_bytes(*transfer);
    operation.data = transfer->data;
    operation.bytes = transfer->bytes;
    operation.tag = reinterpret_cast<std::uintptr_t>(transfer);
    auto& batch = store.batches[path];
    batch.push_back(&operation);
    if (batch.size() < Implementation::kBatch) continue;
    store.paths[path].storage->submit(batch);
    batch.clear();
  }
  for (std::size_t path = 0; path < store.paths.size(); ++path) {
    if (!store.batches[path].empty()) store.paths[path].storage->submit(store.batches[path]);
  }
}

std::size_t ChunkStore::poll(std::span<Transfer*> finished, bool wait) {
  Implementation& store = *implementation_;
  BALLAST_CHECK(!finished.empty());
  base::WakeEvent* const wake = store.own_wake ? &*store.own_wake : store.options.storage.wake;
  for (bool slept = false;;) {
    const std::size_t count = store.poll_paths(finished, wait);
    if (count > 0 || !wait || outstanding() == 0) {
      // What we slept on may have been meant for others too.
      if (slept && wake == store.options.storage.wake) wake->notify();
      return count;
    }
    if (store.paths.size() > 1) {
      wake->wait(1000);
      slept = true;
    }
  }
}

void ChunkStore::flush() {
  for (const Implementation::Path& path : implementation_->paths) {
    const int error = path.storage->flush(path.storage_file);
    if (error == 0) continue;
    throw IoError("chunk file " + path.file->path() + " cannot be made durable: " + errno_text(error) +
                  "; check the drive; the step under way is not committed");
  }
}

std::size_t ChunkStore::outstanding() const {
  std::size_t count = 0;
  for (const Implementation::Path& path : implementation_->paths) count += path.storage->outstanding();
  return count;
}

std::uint64_t ChunkStore::alignment_bytes() const { return implementation_->alignment; }
std::string_view ChunkStore::backend_name() const { return implementation_->paths.front().storage->name(); }
std::string ChunkStore::backend_reason() const { return implementation_->reason; }
bool ChunkStore::direct() const { return implementation_->direct; }

StorageCounters ChunkStore::counters() const {
  StorageCounters sum;
  for (const Implementation::Path& path : implementation_->paths) {
    const StorageCounters& one = path.storage->counters();
    sum.read_bytes += one.read_bytes;
    sum.written_bytes += one.written_bytes;
    sum.read_requests += one.read_requests;
    sum.write_requests += one.write_requests;
    sum.retries += one.retries;
  }
  return sum;
}

std::uint64_t ChunkStore::reserved_bytes() const {
  std::uint64_t sum = 0;
  for (const Implementation::Path& path : implementation_->paths) sum += path.bytes;
  return sum;
}

std::vector<std::string> ChunkStore::files() const {
  std::vector<std::string> files;
  for (const Implementation::Path& path : implementation_->paths) files.push_back(path.file->path());
  return files;
}

std::uint64_t ChunkStore::offset_bytes(std::uint32_t chunk) const {
  return implementation_->extents.at(chunk).offset_bytes;
}

std::uint64_t ChunkStore::slot_bytes(std::uint32_t chunk) const { return implementation_->extents.at(chunk).bytes; }

std::string ChunkStore::file_name(std::uint32_t rank) { return "ballast-rank" + std::to_string(rank) + ".chunks"; }

std::string ChunkStore::describe(const Transfer& transfer) const {
  const Implementation& store = *implementation_;
  if (transfer.chunk >= store.extents.size()) return "no such chunk: " + std::to_string(transfer.chunk);
  return store.paths[transfer.chunk % store.paths.size()].file->path() + " at " +
         std::to_string(store.offset_bytes(transfer));
}

}  // namespace ballast::io
