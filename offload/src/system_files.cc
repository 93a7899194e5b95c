// Reading /proc and /sys: memory, huge pages, block devices. Control groups are in cgroup.cc.
// SPDX-License-Identifier: Apache-2.0
#include "system_files.h"

#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace ballast::offload {
namespace {

constexpr std::size_t kFileBytesMax = std::size_t{1} << 20;

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.remove_suffix(1);
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  return text;
}

std::optional<std::uint64_t> number(std::string_view text) {
  text = trimmed(text);
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// "Key:   123 kB" in /proc/meminfo, in bytes.
std::optional<std::uint64_t> memory_line(std::string_view text, std::string_view key) {
  std::size_t at = 0;
  while (at < text.size()) {
    std::size_t end = text.find('\n', at);
    if (end == std::string_view::npos) end = text.size();
    std::string_view line = text.substr(at, end - at);
    at = end + 1;
    if (line.size() <= key.size() || line.substr(0, key.size()) != key || line[key.size()] != ':') continue;
    line = trimmed(line.substr(key.size() + 1));
    if (line.size() > 3 && line.substr(line.size() - 3) == " kB") line.remove_suffix(3);
    const auto kibibytes = number(line);
    if (!kibibytes || *kibibytes > (UINT64_MAX >> 10)) return std::nullopt;
    return *kibibytes << 10;
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> read_system_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  std::string text;
  char buffer[4096];
  while (text.size() < kFileBytesMax) {
    file.read(buffer, sizeof(buffer));
    const std::streamsize count = file.gcount();
    if (count <= 0) break;
    text.append(buffer, static_cast<std::size_t>(count));
  }
  if (file.bad()) return std::nullopt;
  return text;
}

std::optional<std::uint64_t> read_system_number(const std::string& path) {
  const auto text = read_system_file(path);
  return text ? number(*text) : std::nullopt;
}

MemoryInfo read_memory_info(const std::string& root, std::vector<std::string>& notes) {
  MemoryInfo info;
  const std::string path = root + "/proc/meminfo";
  const auto text = read_system_file(path);
  if (!text) {
    notes.push_back("the machine's memory is not known: " + path + " cannot be read");
    return info;
  }
  info.total_bytes = memory_line(*text, "MemTotal").value_or(0);
  if (info.total_bytes == 0) notes.push_back("the machine's memory is not known: no MemTotal in " + path);
  if (const auto available = memory_line(*text, "MemAvailable")) {
    info.available_bytes = *available;
  } else {
    info.available_bytes = memory_line(*text, "MemFree").value_or(0) + memory_line(*text, "Cached").value_or(0);
    notes.push_back("no MemAvailable in " + path + ": free plus cached memory stands for it");
  }
  info.huge_page_bytes = memory_line(*text, "Hugepagesize").value_or(0);
  return info;
}

HugePageInfo read_huge_page_info(const std::string& root, std::uint64_t default_page_bytes) {
  HugePageInfo info;
  const std::string sizes = root + "/sys/kernel/mm/hugepages/hugepages-";
  for (const std::uint64_t page_bytes : {std::uint64_t{2} << 20, default_page_bytes}) {
    if (page_bytes == 0) continue;
    const std::string folder = sizes + std::to_string(page_bytes >> 10) + "kB";
    const auto free_pages = read_system_number(folder + "/free_hugepages");
    if (!free_pages) continue;
    const std::uint64_t promised = read_system_number(folder + "/resv_hugepages").value_or(0);
    info.page_bytes = page_bytes;
    info.pages_free = *free_pages > promised ? *free_pages - promised : 0;
    break;
  }
  const auto mode = read_system_file(root + "/sys/kernel/mm/transparent_hugepage/enabled");
  info.transparent =
      mode && (mode->find("[always]") != std::string::npos || mode->find("[madvise]") != std::string::npos);
  return info;
}

namespace {

int device_node(const std::filesystem::path& device, int depth) {
  std::error_code error;
  // A combined device is as near as what it is made of, where that agrees.
  const std::filesystem::path parts = device / "slaves";
  if (depth < 8 && std::filesystem::is_directory(parts, error)) {
    int node = -1;
    bool first = true;
    std::filesystem::directory_iterator entry(parts, error);
    while (!error && entry != std::filesystem::directory_iterator()) {
      const std::filesystem::path part = std::filesystem::canonical(entry->path(), error);
      const int part_node = error ? -1 : device_node(part, depth + 1);
      if (!first && part_node != node) return -1;
      node = part_node;
      first = false;
      entry.increment(error);
    }
    if (!first) return node;
  }
  for (std::filesystem::path at = device; at.has_relative_path() && at != at.parent_path(); at = at.parent_path()) {
    const auto text = read_system_file((at / "numa_node").string());
    if (!text) continue;
    const auto value = number(*text);
    if (value && *value <= INT32_MAX) return static_cast<int>(*value);
    return -1;  // "-1": the firmware does not say
  }
  return -1;
}

}  // namespace

int read_block_device_node(const std::string& root, unsigned major, unsigned minor) {
  std::error_code error;
  const std::filesystem::path device =
      std::filesystem::canonical(root + "/sys/dev/block/" + std::to_string(major) + ":" + std::to_string(minor), error);
  return error ? -1 : device_node(device, 0);
}

}  // namespace ballast::offload
