// Dividing a machine among its ranks.
// SPDX-License-Identifier: Apache-2.0
#include "ballast/offload/machine_share.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "ballast/base/error.h"

namespace ballast::offload {
namespace {

struct Place {
  std::string machine;
  std::vector<int> cpus;  // ascending
};

// "0-3,8": ascending ranges.
std::string list_of(const std::vector<int>& cpus) {
  std::string text;
  for (std::size_t i = 0; i < cpus.size();) {
    std::size_t end = i + 1;
    while (end < cpus.size() && cpus[end] == cpus[end - 1] + 1) ++end;
    text += (text.empty() ? "" : ",") + std::to_string(cpus[i]);
    if (end > i + 1) text += "-" + std::to_string(cpus[end - 1]);
    i = end;
  }
  return text;
}

[[noreturn]] void nonsense(const std::string& text) {
  throw CommunicationError("a rank says that it runs on \"" + text.substr(0, 100) +
                           "\", which means nothing here: start every rank with the same program");
}

int number(const std::string& whole, const char*& at, const char* end) {
  int value = 0;
  const auto result = std::from_chars(at, end, value);
  if (result.ec != std::errc() || value < 0 || value > 1 << 20) nonsense(whole);
  at = result.ptr;
  return value;
}

Place place_of(const std::string& text) {
  Place place;
  const std::size_t space = text.rfind(' ');
  if (space == std::string::npos) nonsense(text);
  place.machine = text.substr(0, space);
  const char* const end = text.data() + text.size();
  for (const char* at = text.data() + space + 1; at != end;) {
    const int first = number(text, at, end);
    int last = first;
    if (at != end && *at == '-') last = number(text, ++at, end);
    for (int cpu = first; cpu <= last; ++cpu) place.cpus.push_back(cpu);
    if (at != end && *at++ != ',') nonsense(text);
  }
  return place;
}

int node_of(const Topology& topology, const std::vector<int>& cpus) {
  if (topology.nodes.size() < 2 || cpus.empty()) return -1;
  for (const NumaNode& node : topology.nodes) {
    const auto here = [&](int cpu) { return std::find(node.cpus.begin(), node.cpus.end(), cpu) != node.cpus.end(); };
    if (std::all_of(cpus.begin(), cpus.end(), here)) return node.os_index;
  }
  return -1;
}

// Along the nodes: those of a node side by side.
std::vector<int> by_node(const Topology& topology, const std::vector<int>& cpus) {
  std::vector<int> ordered;
  const auto add = [&](const std::vector<int>& some) {
    for (const int cpu : some) {
      const bool mine = std::find(cpus.begin(), cpus.end(), cpu) != cpus.end();
      if (mine && std::find(ordered.begin(), ordered.end(), cpu) == ordered.end()) ordered.push_back(cpu);
    }
  };
  for (const NumaNode& node : topology.nodes) add(node.cpus);
  add(cpus);
  return ordered;
}

}  // namespace

std::string machine_text(const Topology& topology) {
  char host[256] = {};
  if (::gethostname(host, sizeof host - 1) != 0) host[0] = '?';
  return std::string(host) + ' ' + list_of(topology.cpus);
}

MachineShare machine_share(const Topology& topology, std::span<const std::string> texts, std::size_t mine) {
  std::vector<Place> here;  // of the ranks on this machine
  std::size_t own = 0;
  const Place place = place_of(texts[mine]);
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    Place other = place_of(texts[rank]);
    if (other.machine != place.machine) continue;
    if (rank == mine) own = here.size();
    here.push_back(std::move(other));
  }
  MachineShare share;
  share.ranks = static_cast<int>(here.size());
  std::size_t alike = 0, before = 0;
  for (std::size_t i = 0; i < here.size(); ++i) {
    if (here[i].cpus != place.cpus) continue;
    if (i < own) ++before;
    ++alike;
  }
  std::vector<int> part = place.cpus;
  if (alike > 1 && !part.empty()) {
    const std::vector<int> ordered = by_node(topology, place.cpus);
    const std::size_t begin = before * ordered.size() / alike;
    const std::size_t end = std::max(begin + 1, (before + 1) * ordered.size() / alike);
    part.assign(ordered.begin() + static_cast<std::ptrdiff_t>(begin),
                ordered.begin() + static_cast<std::ptrdiff_t>(end));
    if (topology.nodes.size() > 1) share.cpus = part;
  }
  share.numa_node = node_of(topology, part);
  double cpus = static_cast<double>(std::max<std::size_t>(part.size(), 1));
  double fair = 0;
  for (const int cpu : place.cpus) {
    fair += 1.0 / static_cast<double>(std::count_if(here.begin(), here.end(), [&](const Place& each) {
              return std::binary_search(each.cpus.begin(), each.cpus.end(), cpu);
            }));
  }
  if (fair > 0) cpus = std::min(cpus, std::floor(fair + 1e-6));
  if (topology.cpu_quota > 0) cpus = std::min(cpus, std::floor(std::ceil(topology.cpu_quota) / share.ranks));
  share.threads = std::max(1, static_cast<int>(cpus));
  return share;
}

bool keep_thread_on(std::span<const int> cpus) {
  if (cpus.empty()) return true;
  const int most = *std::max_element(cpus.begin(), cpus.end()) + 1;
  cpu_set_t* const mask = CPU_ALLOC(most);
  if (mask == nullptr) return false;
  const std::size_t bytes = CPU_ALLOC_SIZE(most);
  CPU_ZERO_S(bytes, mask);
  for (const int cpu : cpus) CPU_SET_S(cpu, bytes, mask);
  const bool kept = ::sched_setaffinity(0, bytes, mask) == 0;
  CPU_FREE(mask);
  return kept;
}

}  // namespace ballast::offload
