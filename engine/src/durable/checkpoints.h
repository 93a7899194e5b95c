// Checkpoints: folders with one committed step each, written beside and put in place whole. What is in one is laid out
// as under nvme.paths: a chunk file and a manifest for each rank that held a part.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/io/chunk_store.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "durable/manifest.h"

namespace ballast::engine {

// Holds a folder (of checkpoints, of safetensors files) against other writers. Throws IoError where one is there.
class FolderLock {
 public:
  explicit FolderLock(const std::string& folder);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  int lock_file_in(const std::string& folder);
  const int descriptor_;
  int file_ = -1;  // locked instead, where a folder cannot be
};

// A folder that is being written, by all ranks: `path` + ".new", put in place at the end.
class CheckpointFolder {
 public:
  // By one rank, before the others write: makes the folder, and holds the folder around it against other writers.
  // Throws IoError, also where something else than a checkpoint has its name.
  explicit CheckpointFolder(std::string path);
  ~CheckpointFolder();  // removes what was not published
  CheckpointFolder(const CheckpointFolder&) = delete;
  CheckpointFolder& operator=(const CheckpointFolder&) = delete;

  static std::string unpublished(const std::string& path) { return path + ".new"; }
  // Once all ranks' files are durable. Takes the place of an older folder of that name in one step.
  void publish();
  // Of the `step-N` folders it stays, and of those beside it the newest, `keep` in all (0: all).
  void prune(std::size_t keep);

 private:
  const std::string path_;
  const std::string parent_;
  std::optional<FolderLock> lock_;
  bool published_ = false;
};

// The `step-N` folders in a directory, newest first; (N, path). None where there is no such directory. Those that hold
// files and none of ours are another program's: they do not count, and nothing here removes them.
std::vector<std::pair<std::uint64_t, std::string>> list_checkpoints(const std::string& directory);

// Removes what interrupted saves have left in a directory, as far as it can; or all its checkpoints (throws IoError).
void tidy_checkpoints(const std::string& directory);
void remove_checkpoints(const std::string& directory);

// Whether the manifests of a step in a folder are all that one copy of everything takes, by their names; `elsewhere`:
// ranks, from the first on, that have one though it may lie on another machine. A damaged one counts: it is for its
// reader to tell.
bool has_all_ranks(const std::shared_ptr<io::SmallFiles>& files, std::uint64_t step, std::uint32_t elsewhere = 0);

// `path` itself where it holds manifests, else the newest `step-N` folder in it that does. The newest step that has the
// manifests of all ranks that one copy of everything takes, else the newest. Nothing where there is none.
struct FoundCheckpoint {
  std::string path;
  std::uint64_t step = 0;
};
std::optional<FoundCheckpoint> find_checkpoint(const std::string& path);

// Everything in it, and itself; nothing where there is none. Throws IoError.
void remove_folder(const std::string& path);
void make_folder(const std::string& path);

// Returns once no other process holds the chunk file, at once where there is none. Throws IoError after 10 seconds.
void wait_until_unlocked(const std::string& file);

}  // namespace ballast::engine
