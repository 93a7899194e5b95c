// ChunkFile: the one file of a path. Opened, locked, its space reserved, direct where a real write and read work.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "chunk_file_header.h"
#include "fork_guard.h"

namespace ballast::io {

// The least alignment used: the page of memory and block of most file systems, below which writes are serialised.
constexpr std::uint64_t kUsualAlignmentBytes = 4096;

class ChunkFile {
 public:
  using Note = std::function<void(const std::string&)>;

  // Opens or makes the file and takes its lock, waiting at most lock_wait_ms. Reads nothing but an old header, changes
  // nothing yet. Throws IoError.
  ChunkFile(std::string path, int lock_wait_ms);
  // Closes; removes the file unless keep() was called, where it is this object's to remove.
  ~ChunkFile();
  ChunkFile(const ChunkFile&) = delete;
  ChunkFile& operator=(const ChunkFile&) = delete;

  // Switches to direct I/O where a real aligned write and read of the header block works; else stays buffered and says
  // so in *reason. Overwrites the first bytes of the file: of a file with contents to keep call it with its header.
  void choose_mode(const HeaderBlock& block, std::string* reason);
  // Makes the file exactly `bytes` long with all its space reserved. `fresh` drops what it held. Throws IoError (disk
  // full: with directory, wanted and free).
  void reserve(std::uint64_t bytes, bool fresh, const Note& note);
  void write_header(const ChunkFileHeader& header);

  const std::string& path() const { return path_; }
  int descriptor() const { return descriptor_; }
  bool made() const { return made_; }  // did not exist before
  bool has_old_header() const { return has_old_header_; }
  const ChunkFileHeader& old_header() const { return old_header_; }
  // Why what was found has no readable header.
  const std::string& old_header_problem() const { return old_header_problem_; }
  std::uint64_t occupied_bytes() const;  // on disk now
  bool direct() const { return direct_; }
  std::uint64_t alignment_bytes() const { return alignment_bytes_; }  // after choose_mode

  void keep() { keep_ = true; }
  void remove_at_close() { keep_ = false; }
  bool owned_here() const { return guard_.owned_here(); }

 private:
  void open_and_lock(int lock_wait_ms);
  bool try_lock();
  bool is_still_at_path() const;
  void read_old_header();
  bool write_and_compare(const HeaderBlock& block, std::uint64_t alignment);

  std::string path_;
  ForkGuard guard_;
  int descriptor_ = -1;
  bool made_ = false;
  bool keep_ = true;
  bool direct_ = false;
  bool has_old_header_ = false;
  std::uint64_t alignment_bytes_ = kUsualAlignmentBytes;
  ChunkFileHeader old_header_;
  std::string old_header_problem_;
};

}  // namespace ballast::io
