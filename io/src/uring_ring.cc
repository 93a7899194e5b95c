// Setting up, proving and giving back a ring; its tables of files and memory.
// SPDX-License-Identifier: Apache-2.0
#include "uring_ring.h"

#include <ballast/base/check.h>
#include <ballast/base/size.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "errno_text.h"
#include "uring_storage.h"

#ifndef IORING_SETUP_COOP_TASKRUN
#define IORING_SETUP_COOP_TASKRUN (1U << 8)
#define IORING_SETUP_TASKRUN_FLAG (1U << 9)
#endif

namespace ballast::io {
namespace {

// The kernel takes at most 1 GiB in one registered buffer. Pieces end at multiples of this address.
constexpr std::uint64_t kMemoryPieceBytes = std::uint64_t{512} << 20;
constexpr std::uint32_t kFileSlots = 64;

std::uint64_t address(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

}  // namespace

UringRing::UringRing(std::uint32_t depth, int wake_descriptor) {
  set_up(std::max<std::uint32_t>(depth, 2));
  try {
    prove();
    // Empty slots now, descriptors as they come. A kernel that refuses costs us only speed.
    std::array<int, kFileSlots> empty;
    empty.fill(-1);
    if (io_uring_register_files(&ring_, empty.data(), empty.size()) == 0) file_slots_ = kFileSlots;
    if (wake_descriptor >= 0) {
      const int result = io_uring_register_eventfd(&ring_, wake_descriptor);
      if (result < 0) throw UringUnavailable("io_uring_register_eventfd", -result);
    }
  } catch (...) {
    guard_.release();
    io_uring_queue_exit(&ring_);
    throw;
  }
}

UringRing::~UringRing() {
  if (!guard_.owned_here()) return;
  // Explicitly, as the kernel tears a closed ring down some time later, and would keep files and memory until then.
  if (file_slots_ > 0) io_uring_unregister_files(&ring_);
  if (!pieces_.empty()) io_uring_unregister_buffers(&ring_);
  guard_.release();
  io_uring_queue_exit(&ring_);
}

void UringRing::set_up(std::uint32_t entries) {
  // Best first. Without interrupts for completions (COOP_TASKRUN, 5.19) a kernel spends less; the flag tells us to
  // look. SINGLE_ISSUER and DEFER_TASKRUN are out: any thread may call a Storage, one at a time.
  constexpr std::array<unsigned, 2> flag_sets = {IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG, 0};
  int result = 0;
  for (const unsigned flags : flag_sets) {
    result = 0;
    guard_.open([&] {
      io_uring_params parameters = {};
      parameters.flags = flags;
      result = io_uring_queue_init_params(entries, &ring_, &parameters);
      return result < 0 ? -1 : ring_.ring_fd;
    });
    if (result == 0) {
      io_uring_ring_dontfork(&ring_);
      return;
    }
    if (result != -EINVAL) break;
  }
  throw UringUnavailable("io_uring_setup", -result);
}

void UringRing::prove() {
  // Filters exist that allow the set-up and refuse the rest: one real request.
  io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
  BALLAST_CHECK(entry != nullptr);
  io_uring_prep_nop(entry);
  int result;
  do {
    result = io_uring_submit_and_wait(&ring_, 1);
  } while (result == -EINTR);
  io_uring_cqe* completion = nullptr;
  if (result >= 0) {
    do {
      result = io_uring_wait_cqe(&ring_, &completion);
    } while (result == -EINTR);
  }
  if (result < 0) throw UringUnavailable("io_uring_enter", -result);
  io_uring_cqe_seen(&ring_, completion);

  // The answer's errno would be lost in io_uring_get_probe_ring.
  constexpr unsigned kMostOperations = 256;
  alignas(io_uring_probe) std::array<std::byte, sizeof(io_uring_probe) + kMostOperations * sizeof(io_uring_probe_op)>
      memory{};
  auto* const probe = reinterpret_cast<io_uring_probe*>(memory.data());
  result = io_uring_register_probe(&ring_, probe, kMostOperations);
  if (result < 0) throw UringUnavailable("io_uring_register", -result);
  for (const int needed : {IORING_OP_READ, IORING_OP_WRITE, IORING_OP_READ_FIXED, IORING_OP_WRITE_FIXED}) {
    if (!io_uring_opcode_supported(probe, needed)) throw UringUnavailable("io_uring reads and writes", EOPNOTSUPP);
  }
}

int UringRing::add_file(int descriptor) {
  if (files_ >= file_slots_) return -1;
  const int result = io_uring_register_files_update(&ring_, files_, &descriptor, 1);
  return result == 1 ? static_cast<int>(files_++) : -1;
}

int UringRing::register_all(const std::vector<iovec>& pieces) {
  if (pieces.empty()) return 0;
  int result;
  do {
    result = io_uring_register_buffers(&ring_, pieces.data(), static_cast<unsigned>(pieces.size()));
  } while (result == -EINTR);
  return result;
}

bool UringRing::register_memory(std::span<std::byte> memory, std::string* reason) {
  if (memory.empty()) return true;
  std::vector<iovec> wanted = pieces_;
  std::byte* const end = memory.data() + memory.size();
  for (std::byte* begin = memory.data(); begin < end;) {
    const std::uint64_t until_border = kMemoryPieceBytes - address(begin) % kMemoryPieceBytes;
    const std::uint64_t bytes = std::min<std::uint64_t>(until_border, static_cast<std::uint64_t>(end - begin));
    wanted.push_back({begin, bytes});
    begin += bytes;
  }
  std::sort(wanted.begin(), wanted.end(),
            [](const iovec& a, const iovec& b) { return address(a.iov_base) < address(b.iov_base); });
  for (std::size_t i = 1; i < wanted.size(); ++i) {
    if (address(wanted[i - 1].iov_base) + wanted[i - 1].iov_len > address(wanted[i].iov_base)) {
      if (reason != nullptr) *reason = "a part of this memory is registered already";
      return false;
    }
  }
  // The table is replaced as a whole: that works on every kernel, and happens at start-up only.
  if (!pieces_.empty()) io_uring_unregister_buffers(&ring_);
  const int result = register_all(wanted);
  if (result == 0) {
    pieces_ = std::move(wanted);
    return true;
  }
  if (reason != nullptr) {
    rlimit limit = {};
    ::getrlimit(RLIMIT_MEMLOCK, &limit);
    *reason = "io_uring cannot register " + base::format_size(memory.size()) + ": " + errno_text(-result);
    if (result == -ENOMEM || result == -EPERM) {
      *reason += "; the locked-memory limit is " +
                 (limit.rlim_cur == RLIM_INFINITY ? std::string("unlimited") : base::format_size(limit.rlim_cur)) +
                 " (raise it with ulimit -l or memlock in limits.conf)";
    }
  }
  if (register_all(pieces_) != 0) pieces_.clear();  // memory that was registered works unregistered too
  return false;
}

int UringRing::find_buffer(const std::byte* data, std::uint64_t* bytes) const {
  const auto next = std::upper_bound(pieces_.begin(), pieces_.end(), address(data),
                                     [](std::uint64_t a, const iovec& piece) { return a < address(piece.iov_base); });
  if (next != pieces_.begin()) {
    const iovec& piece = *(next - 1);
    const std::uint64_t end = address(piece.iov_base) + piece.iov_len;
    if (address(data) < end) {
      *bytes = std::min(*bytes, end - address(data));
      return static_cast<int>(next - 1 - pieces_.begin());
    }
  }
  if (next != pieces_.end()) *bytes = std::min(*bytes, address(next->iov_base) - address(data));
  return -1;
}

}  // namespace ballast::io
