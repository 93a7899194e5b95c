// Worlds of ranks for the communicators' contract, the data that they exchange, and what must come of it.
//
// Data is a pure function of seed, rank and index, so every rank knows what must come out.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/base/error.h>
#include <ballast/base/random.h>
#include <ballast/engine/communicator.h>
#include <ballast/kernels/convert.h>
#include <ballast/offload/device.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

namespace ballast::testing {

using Body = std::function<void(Communicator&)>;

struct World {
  std::string name;
  int size = 1;
  // Fresh communicators, used by nobody else; returns when every rank of this process has ended.
  std::function<void(std::chrono::milliseconds timeout, const Body&)> run;
  bool carries_reasons = true;  // of a rank that gives up, to the others
  bool own_words = false;       // for failures of several ranks, which its own tests look at
};
inline std::ostream& operator<<(std::ostream& out, const World& world) { return out << world.name; }

// The kinds and sizes of world that this program tests; defined by it.
std::vector<World> worlds();
inline std::vector<World> worlds_of_several() {
  std::vector<World> several = worlds();
  std::erase_if(several, [](const World& world) { return world.size == 1 || world.own_words; });
  return several;
}

constexpr std::chrono::milliseconds kPatient{60000};  // nothing is late
constexpr std::chrono::milliseconds kShort{700};      // for ranks that are

// The largest sizes, in elements over all ranks: a sanitizer makes the test's own arithmetic slow.
#ifdef BALLAST_SANITIZED
constexpr std::size_t kManyElements = 90001;
#else
constexpr std::size_t kManyElements = 900001;
#endif

inline std::uint64_t contract_seed() {
  const char* const text = std::getenv("BALLAST_SEED");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : 20261130;
}

inline float value_at(std::uint64_t seed, int rank, std::size_t i) {
  const std::uint64_t bits = base::random_at(seed + 1000 * static_cast<std::uint64_t>(rank), i);
  return static_cast<float>(static_cast<double>(bits >> 11) * 0x1.0p-50 - 4.0) *
         ((bits & 7) == 0 ? 4096.0F : 1.0F);  // sums depend on their order
}

inline std::vector<std::byte> encode(DataType type, const std::vector<float>& values) {
  std::vector<std::byte> bytes(values.size() * element_bytes(type));
  if (values.empty()) return bytes;
  auto* const halves = reinterpret_cast<std::uint16_t*>(bytes.data());
  if (type == DataType::fp32) std::memcpy(bytes.data(), values.data(), bytes.size());
  if (type == DataType::bf16) kernels::fp32_to_bf16(values.data(), halves, values.size());
  if (type == DataType::fp16) kernels::fp32_to_fp16(values.data(), halves, values.size());
  return bytes;
}

inline std::vector<float> decode(DataType type, const std::vector<std::byte>& bytes) {
  std::vector<float> values(bytes.size() / element_bytes(type));
  if (values.empty()) return values;
  const auto* const halves = reinterpret_cast<const std::uint16_t*>(bytes.data());
  if (type == DataType::fp32) std::memcpy(values.data(), bytes.data(), bytes.size());
  if (type == DataType::bf16) kernels::bf16_to_fp32(halves, values.data(), values.size());
  if (type == DataType::fp16) kernels::fp16_to_fp32(halves, values.data(), values.size());
  return values;
}

inline std::vector<std::byte> data_of(std::uint64_t seed, int rank, DataType type, std::size_t elements) {
  std::vector<float> values(elements);
  for (std::size_t i = 0; i < elements; ++i) values[i] = value_at(seed, rank, i);
  return encode(type, values);
}

// ((x0 + x1) + x2) + ..., in fp32, rounded once.
inline std::vector<std::byte> summed(std::uint64_t seed, int ranks, DataType type, std::size_t elements) {
  std::vector<float> sum = decode(type, data_of(seed, 0, type, elements));
  for (int r = 1; r < ranks; ++r) {
    const std::vector<float> next = decode(type, data_of(seed, r, type, elements));
    for (std::size_t i = 0; i < elements; ++i) sum[i] = sum[i] + next[i];
  }
  return encode(type, sum);
}

inline std::vector<std::byte> slice(const std::vector<std::byte>& all, std::size_t part, std::size_t bytes) {
  const auto begin = all.begin() + static_cast<std::ptrdiff_t>(part * bytes);
  return {begin, begin + static_cast<std::ptrdiff_t>(bytes)};
}

// The text of the CommunicationError that `call` throws; empty, and a failure, where it throws none.
template <class Call>
std::string failure_of(const Call& call) {
  try {
    call();
  } catch (const CommunicationError& error) {
    return error.what();
  }
  ADD_FAILURE() << "no CommunicationError";
  return "";
}

// What ranks compute on, where not the host device.
inline std::function<std::unique_ptr<offload::Device>()> make_rank_device = [] { return offload::make_host_device(); };

// A stream of a device of this rank's own.
struct RankStream {
  std::unique_ptr<offload::Device> device = make_rank_device();
  std::unique_ptr<offload::Stream> stream = device->make_stream("collective");
  offload::Stream& operator*() const { return *stream; }
  offload::Stream* operator->() const { return stream.get(); }
};

inline std::size_t at(int rank) { return static_cast<std::size_t>(rank); }
inline std::string rank_name(int rank) { return "rank " + std::to_string(rank); }

}  // namespace ballast::testing
