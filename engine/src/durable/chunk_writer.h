// ChunkWriter: writes chunk after chunk to a store of its own, the next being filled while others are written.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/base/error.h>
#include <ballast/io/chunk_store.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace ballast::engine {

class ChunkWriter {
 public:
  // The store and the buffers (one or more, for the largest chunk each) outlive it; the store is used by nobody else.
  ChunkWriter(io::ChunkStore& store, std::vector<std::byte*> buffers)
      : store_(store), buffers_(std::move(buffers)), transfers_(buffers_.size()), busy_(buffers_.size(), 0) {}
  // Waits for what is under way: the storage uses its transfers until they have ended.
  ~ChunkWriter() {
    std::array<io::Transfer*, 2> finished{};
    while (std::size_t count = any_busy() ? store_.poll(finished, true) : 0) {
      while (count > 0) no_longer_busy(*finished[--count]);
    }
  }
  ChunkWriter(const ChunkWriter&) = delete;
  ChunkWriter& operator=(const ChunkWriter&) = delete;
  // A buffer to be filled, as soon as one is free. Throws IoError where an earlier write has failed.
  std::byte* next() {
    current_ = (current_ + 1) % buffers_.size();
    wait(current_);
    return buffers_[current_];
  }
  // What has been put into it.
  void write(std::uint32_t chunk, std::uint64_t bytes) {
    io::Transfer& transfer = transfers_[current_];
    transfer = {};
    transfer.direction = io::Direction::write;
    transfer.priority = io::Priority::low;
    transfer.chunk = chunk;
    transfer.data = buffers_[current_];
    transfer.bytes = bytes;
    io::Transfer* const one = &transfer;
    busy_[current_] = 1;
    store_.submit({&one, 1});
  }
  void finish() {
    for (std::size_t which = 0; which < busy_.size(); ++which) wait(which);
  }

 private:
  void wait(std::size_t which) {
    while (busy_[which] != 0) {
      std::array<io::Transfer*, 2> finished{};
      const std::size_t count = store_.poll(finished, true);
      for (std::size_t i = 0; i < count; ++i) no_longer_busy(*finished[i]);
      for (std::size_t i = 0; i < count; ++i) {
        if (finished[i]->error_number == 0) continue;
        throw IoError("writing " + store_.describe(*finished[i]) +
                      " failed: " + std::strerror(finished[i]->error_number));
      }
    }
  }

  void no_longer_busy(const io::Transfer& transfer) {
    busy_[static_cast<std::size_t>(&transfer - transfers_.data())] = 0;
  }
  bool any_busy() const {
    return std::any_of(busy_.begin(), busy_.end(), [](std::uint8_t busy) { return busy != 0; });
  }

  io::ChunkStore& store_;
  const std::vector<std::byte*> buffers_;
  std::vector<io::Transfer> transfers_;
  std::vector<std::uint8_t> busy_;
  std::size_t current_ = 0;
};

}  // namespace ballast::engine
