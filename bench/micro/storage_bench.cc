// Storage: bytes per second and CPU per gigabyte of both back ends, over block size and depth; and what one small
// operation costs with the device taken away (a file in memory).
//
// Runs in the working directory, or in BALLAST_BENCH_DIR; its file (1 GiB) is fully written first and removed at the
// end. SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/base/size.h>
#include <ballast/io/open_storage.h>
#include <benchmark/benchmark.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

namespace ballast::io {
namespace {

constexpr std::uint64_t kFileBytes = 1 * base::kGiB;
constexpr std::uint64_t kMemoryBytes = 64 * base::kMiB;

double cpu_seconds() {
  rusage usage;
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// Huge pages where some are reserved, transparent ones otherwise.
std::byte* huge_memory() {
  static std::byte* const memory = [] {
    void* made =
        ::mmap(nullptr, kMemoryBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0);
    if (made == MAP_FAILED) {
      made = ::mmap(nullptr, 2 * kMemoryBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (made == MAP_FAILED) throw IoError("no memory for the benchmark");
      const auto address = base::round_up(reinterpret_cast<std::uintptr_t>(made), 2 * base::kMiB);
      made = reinterpret_cast<void*>(address);
      ::madvise(made, kMemoryBytes, MADV_HUGEPAGE);
    }
    auto* bytes = static_cast<std::byte*>(made);
    std::fill(bytes, bytes + kMemoryBytes, std::byte{0x5a});
    return bytes;
  }();
  return memory;
}

struct File {
  explicit File(const std::string& directory) : path(directory + "/ballast-storage-bench") {
    descriptor = ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | O_DIRECT, 0600);
    if (descriptor < 0) descriptor = ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (descriptor < 0) throw IoError(path + " cannot be made");
    for (std::uint64_t offset = 0; offset < kFileBytes; offset += kMemoryBytes) {
      if (::pwrite(descriptor, huge_memory(), kMemoryBytes, static_cast<off_t>(offset)) !=
          static_cast<ssize_t>(kMemoryBytes)) {
        throw IoError(path + " cannot be written");
      }
    }
  }
  ~File() {
    ::close(descriptor);
    ::unlink(path.c_str());
  }
  std::string path;
  int descriptor;
};

int disk_file() {
  const char* directory = std::getenv("BALLAST_BENCH_DIR");
  static const File file(directory != nullptr ? directory : ".");
  return file.descriptor;
}

// One iteration moves the whole file once, in sixteen outstanding operations of 4 MiB.
// needs.
void transfer(benchmark::State& state, Backend backend, Direction direction) {
  const auto block = static_cast<std::uint64_t>(state.range(0));
  const auto depth = static_cast<std::uint32_t>(state.range(1));
  const int descriptor = disk_file();
  OpenedStorage opened;
  try {
    opened = open_storage(backend, {.block_bytes = block, .queue_depth = depth});
  } catch (const IoError& error) {
    state.SkipWithError(error.what());
    return;
  }
  Storage& storage = *opened.storage;
  const std::uint32_t file = storage.add_file(descriptor);
  std::string reason;
  if (!storage.register_memory({huge_memory(), kMemoryBytes}, &reason)) state.SetLabel(reason);
  constexpr std::uint64_t kOperationBytes = 4 * base::kMiB;
  std::vector<Operation> operations(kMemoryBytes / kOperationBytes);
  std::vector<Operation*> finished(operations.size());
  const double cpu_before = cpu_seconds();
  for (auto _ : state) {
    std::uint64_t next = 0;
    const auto start = [&](Operation& operation) {
      operation.direction = direction;
      operation.file = file;
      operation.offset_bytes = next;
      operation.bytes = kOperationBytes;
      next += kOperationBytes;
      Operation* const pointer = &operation;
      storage.submit({&pointer, 1});
    };
    for (std::size_t i = 0; i < operations.size(); ++i) {
      operations[i].data = huge_memory() + i * kOperationBytes;
      start(operations[i]);
    }
    while (storage.outstanding() > 0) {
      const std::size_t count = storage.poll(finished, true);
      for (std::size_t i = 0; i < count; ++i) {
        if (finished[i]->error_number != 0) state.SkipWithError("a transfer failed");
        if (next < kFileBytes) start(*finished[i]);
      }
    }
  }
  const double gigabytes = static_cast<double>(state.iterations()) * static_cast<double>(kFileBytes) * 1e-9;
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(kFileBytes));
  state.counters["cpu_ms_per_GB"] = (cpu_seconds() - cpu_before) * 1e3 / gigabytes;
}

#define BALLAST_TRANSFER(name, backend, direction)      \
  BENCHMARK_CAPTURE(transfer, name, backend, direction) \
      ->ArgNames({"block", "depth"})                    \
      ->Args({base::kMiB, 32})                          \
      ->Args({base::kMiB, 8})                           \
      ->Args({256 * base::kKiB, 32})                    \
      ->Args({64 * base::kKiB, 32})                     \
      ->UseRealTime()                                   \
      ->Unit(benchmark::kMillisecond)
BALLAST_TRANSFER(uring_read, Backend::io_uring, Direction::read);
BALLAST_TRANSFER(uring_write, Backend::io_uring, Direction::write);
BALLAST_TRANSFER(threads_read, Backend::threads, Direction::read);
BALLAST_TRANSFER(threads_write, Backend::threads, Direction::write);

// 4 KiB operations against a file in memory: what the storage itself costs per operation.
void overhead(benchmark::State& state, Backend backend) {
  const int descriptor = ::memfd_create("ballast-bench", MFD_CLOEXEC);
  OpenedStorage opened;
  try {
    if (descriptor < 0 || ::ftruncate(descriptor, 1 << 20) != 0) throw IoError("memfd_create failed");
    opened = open_storage(backend, {.queue_depth = 32});
    opened.storage->add_file(descriptor);
  } catch (const IoError& error) {
    state.SkipWithError(error.what());
    return;
  }
  std::array<Operation, 32> operations;
  std::array<Operation*, 32> pointers, finished;
  for (std::size_t i = 0; i < operations.size(); ++i) {
    operations[i].offset_bytes = i * 4096;
    operations[i].bytes = 4096;
    operations[i].data = huge_memory() + i * 4096;
    pointers[i] = &operations[i];
  }
  for (auto _ : state) {
    opened.storage->submit(pointers);
    while (opened.storage->poll(finished, true) > 0) {
    }
  }
  state.SetItemsProcessed(state.iterations() * static_cast<std::int64_t>(operations.size()));
  opened.storage.reset();
  ::close(descriptor);
}
BENCHMARK_CAPTURE(overhead, uring, Backend::io_uring)->UseRealTime();
BENCHMARK_CAPTURE(overhead, threads, Backend::threads)->UseRealTime();

}  // namespace
}  // namespace ballast::io
