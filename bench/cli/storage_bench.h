// Raw transfers over the storage seam: the speed of light that training is compared with. Over files of their own, one
// per path, all written before anything is read; or over files that are there, whose contents stay as they are.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/io/open_storage.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "block_order.h"

namespace ballast::cli {

struct StorageBenchOptions {
  std::vector<std::string> paths;  // directories; made where missing, and removed again
  // Where not empty: files to read and rewrite, in place of `paths` and `bytes_per_path`. Whole blocks of them are
  // used. Nobody else may write there during a pass.
  std::vector<std::string> files;
  std::uint64_t bytes_per_path = std::uint64_t{2} << 30;
  std::uint64_t block_bytes = std::uint64_t{1} << 20;  // bytes_per_path is a multiple of it
  std::uint32_t queue_depth = 32;                      // per path
  io::Backend backend = io::Backend::automatic;
  std::uint64_t run_blocks = 1;  // rewrite: blocks in a row that go one way
  double pass_seconds_max = 0;   // a pass ends early after that; 0: never
};

class StorageBench {
 public:
  // Opens the files (its own without a name, so that nothing is left whatever happens) and takes memory. Throws
  // IoError, ConfigError or PlanError.
  explicit StorageBench(const StorageBenchOptions& options);
  ~StorageBench();
  StorageBench(const StorageBench&) = delete;
  StorageBench& operator=(const StorageBench&) = delete;

  // read, write: the whole of the files once. rewrite: each block is read and written back as it was; both directions
  // are under way at once. A file that is not its own is never written otherwise.
  using Pattern = BlockOrder::Pattern;
  struct Result {
    double seconds = 0;
    double cpu_seconds = 0;  // of this process, all threads, user and system
    std::uint64_t bytes = 0;
    double bytes_per_second() const { return seconds > 0 ? static_cast<double>(bytes) / seconds : 0; }
    double cpu_seconds_per_gigabyte() const { return bytes > 0 ? cpu_seconds / (static_cast<double>(bytes) / 1e9) : 0; }
  };
  // Writes the whole of its own files for the first time; before any run(). Not flushed.
  Result prepare();
  // One pass. Blocks read from its own files are checked to be those that were written (CorruptionError). In so many
  // equal parts, after each of which everything has ended and `between` is called; its time counts.
  Result run(Pattern pattern, std::uint64_t parts = 1, const std::function<void()>& between = {});
  double flush_seconds();  // makes what was written durable

  // Of its files, while it lives: for another one to read and rewrite.
  std::vector<std::string> open_files() const;

  std::string backend_name() const;
  const std::string& backend_reason() const;
  bool direct() const;                     // false: the page cache is measured
  const std::string& memory_note() const;  // pages, and whether they are registered

 private:
  struct Implementation;
  std::unique_ptr<Implementation> implementation_;
};

io::Backend backend_from(const std::string& name);

}  // namespace ballast::cli
