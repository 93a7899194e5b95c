// Communicator: the seam to the other ranks. Every rank makes the same calls on a communicator in the same order. The
// single communicator is the world of one rank.
//
// Two kinds of call. The small ones block the caller. The large ones are enqueued on a stream of the device, over one
// flat buffer each, and return at once; what comes after them on the stream sees their result. Communicators made by
// duplicate() or split() have an order of their own, so that calls on two of them may be under way at once.
//
// Failure. A rank that is missing, late beyond the timeout, gone or at odds with the others ends in a
// CommunicationError that names it: thrown by the small calls; latched by the large ones, whose buffers then hold
// anything, and thrown by the next call of any kind and by check(). Nothing waits for ever. The first failure of a
// communicator also ends what is under way on those made from it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/engine/config.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace ballast {

namespace offload {
class Stream;
}

class Communicator {
 public:
  virtual ~Communicator() = default;          // collective work enqueued before has ended or failed
  virtual std::string_view name() const = 0;  // "single", "in-process", "mpi", "nccl"
  virtual int world_size() const = 0;
  virtual int rank() const = 0;

  // --- blocking, on the caller's thread; one at a time per communicator ---------------------------------------------

  // values[i] = sum over ranks, added in rank order: the same on every rank, bit for bit.
  virtual void all_reduce_sum(std::span<double> values) = 0;
  virtual void all_gather(std::span<const std::byte> mine, std::span<std::byte> all) = 0;  // all: world_size * mine
  virtual void broadcast(std::span<std::byte> data, int root) = 0;
  virtual void barrier() = 0;

  // --- enqueued on a stream -----------------------------------------------------------------------------------------
  // Buffers stay valid until the stream has passed the call. Addresses are the device's.

  // The unit that the large calls after this are about: ranks whose calls are about different ones are at odds, as
  // where sizes differ, and the error names both. Where the transport compares calls (NCCL does not). One thread at a
  // time makes these calls and the large ones.
  virtual void set_unit(std::uint32_t unit) { static_cast<void>(unit); }
  // In place: rank r's part lies at data + r * part_bytes, and is sent to all others.
  virtual void all_gather(std::byte* data, std::size_t part_bytes, offload::Stream& stream) = 0;
  // part[i] = sum over ranks of their data[rank * part_elements + i]; fp32, bf16 or fp16 (then summed in fp32 and
  // rounded once). CPU ranks add in rank order. `part` may lie within `data`, at this rank's place.
  virtual void reduce_scatter_sum(const std::byte* data, std::byte* part, std::size_t part_elements, DataType type,
                                  offload::Stream& stream) = 0;
  // In place, the same order of adding.
  virtual void all_reduce_sum(std::byte* data, std::size_t elements, DataType type, offload::Stream& stream) = 0;

  // --- memory that large calls use again and again ------------------------------------------------------------------
  // Made known to the transport once, where that makes them faster (NCCL); elsewhere nothing is done. Local: ranks need
  // not do the same. The memory is the caller's; it is taken back, with no call on it under way, before it goes, or
  // outlives the communicator. False, with the reason, where the transport refuses: calls on it work all the same.
  virtual bool register_buffer(std::span<std::byte> buffer, std::string* reason) {
    static_cast<void>(buffer);
    static_cast<void>(reason);
    return true;
  }
  virtual void unregister_buffer(std::span<std::byte> buffer) noexcept { static_cast<void>(buffer); }

  // --- more of them, and their end ----------------------------------------------------------------------------------

  // The same ranks with an order of their own. Blocks; every rank calls it.
  virtual std::shared_ptr<Communicator> duplicate() = 0;
  // The ranks that give the same color, in the order of their ranks here. Blocks; every rank calls it.
  virtual std::shared_ptr<Communicator> split(int color) = 0;
  virtual void check() const = 0;  // throws what has been latched
  // This rank gives up: everything under way ends with an error here, and at the other ranks with one that names this
  // rank and `reason`, where the transport can carry it. Any thread, any number of times.
  virtual void abort(std::string_view reason) noexcept = 0;
};

std::shared_ptr<Communicator> make_single_communicator();

}  // namespace ballast
