// SmallFiles: the seam around the few small files of a directory that say what the large ones hold. Their steps are
// apart, so that a double can lose any of them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace ballast::io {

// Names are without a directory. Every call throws IoError naming file and cause. One thread at a time.
class SmallFiles {
 public:
  virtual ~SmallFiles() = default;
  virtual std::vector<std::string> list() = 0;  // sorted; none where the directory is missing
  virtual std::vector<std::byte> read(const std::string& name) = 0;
  virtual void write(const std::string& name, std::span<const std::byte> bytes) = 0;  // made anew, whole
  virtual void flush(const std::string& name) = 0;
  virtual void rename(const std::string& from, const std::string& to) = 0;  // over what is there
  virtual void flush_directory() = 0;                                       // names that were made, changed, removed
  virtual void remove(const std::string& name) = 0;                         // nothing where there is none
  virtual std::string path(const std::string& name) const = 0;              // for people
};

std::unique_ptr<SmallFiles> make_small_files(std::string directory);

// Whole or not at all, whenever the machine stops: written beside, flushed, renamed, the directory flushed.
void publish(SmallFiles& files, const std::string& name, std::span<const std::byte> bytes);
// What publish() leaves where it was interrupted ends with this.
constexpr const char* kUnpublishedSuffix = ".new";

}  // namespace ballast::io
