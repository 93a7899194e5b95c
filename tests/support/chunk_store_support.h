// What the tests of ChunkStore share: options, transfers, and chunks that are written and read back.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/base/size.h>
#include <ballast/io/chunk_store.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "io_support.h"

namespace ballast::io {

constexpr std::array<std::uint8_t, 16> kRunA = {1, 2, 3, 4};
constexpr std::array<std::uint8_t, 16> kRunB = {9, 8, 7, 6};

struct Notes {
  std::vector<std::string> lines;
  std::function<void(std::string)> sink() {
    return [this](std::string line) { lines.push_back(std::move(line)); };
  }
};

inline ChunkStoreOptions options_for(std::vector<std::string> paths, std::vector<std::uint64_t> chunk_bytes) {
  ChunkStoreOptions options;
  options.paths = std::move(paths);
  options.chunk_bytes = std::move(chunk_bytes);
  options.run_identity = kRunA;
  options.lock_wait_ms = 50;
  return options;
}

inline void run_all(ChunkStore& store, std::vector<Transfer>& transfers) {
  std::vector<Transfer*> pointers;
  for (Transfer& one : transfers) pointers.push_back(&one);
  store.submit(pointers);
  std::array<Transfer*, 5> finished;
  std::size_t back = 0;
  while (const std::size_t count = store.poll(finished, true)) {
    for (std::size_t i = 0; i < count; ++i) EXPECT_EQ(finished[i]->error_number, 0) << store.describe(*finished[i]);
    back += count;
  }
  EXPECT_EQ(back, transfers.size());
  EXPECT_EQ(store.outstanding(), 0u);
}

inline std::uint64_t padded(const ChunkStore& store, std::uint64_t bytes) {
  return base::round_up(bytes, store.alignment_bytes());
}

inline Transfer transfer(Direction direction, std::uint32_t chunk, std::uint32_t slot, std::byte* data,
                         std::uint64_t bytes, std::uint64_t begin = 0) {
  Transfer made;
  made.direction = direction;
  made.chunk = chunk;
  made.slot = slot;
  made.data = data;
  made.bytes = bytes;
  made.begin_bytes = begin;
  return made;
}

// Writes every slot of every chunk with its own pattern, then reads all back.
inline void write_and_read_all(ChunkStore& store, const std::vector<std::uint64_t>& chunk_bytes, std::uint32_t slots) {
  std::vector<std::unique_ptr<test::AlignedMemory>> out, in;
  std::vector<Transfer> writes, reads;
  for (std::uint32_t chunk = 0; chunk < chunk_bytes.size(); ++chunk) {
    for (std::uint32_t slot = 0; slot < slots; ++slot) {
      const std::uint64_t bytes = padded(store, chunk_bytes[chunk]);
      out.push_back(std::make_unique<test::AlignedMemory>(bytes));
      in.push_back(std::make_unique<test::AlignedMemory>(bytes));
      test::fill_pattern(out.back()->span(), chunk * 2 + slot);
      writes.push_back(transfer(Direction::write, chunk, slot, out.back()->data(), bytes));
      reads.push_back(transfer(Direction::read, chunk, slot, in.back()->data(), bytes));
    }
  }
  run_all(store, writes);
  run_all(store, reads);
  for (std::size_t i = 0; i < in.size(); ++i) {
    EXPECT_TRUE(test::holds_pattern(in[i]->span(), reads[i].chunk * 2 + reads[i].slot)) << "chunk " << reads[i].chunk;
  }
}

}  // namespace ballast::io
