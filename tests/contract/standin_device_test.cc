// The CUDA device keeps the contract of every device; over the stand-in, in the order that its seeds give too. And what
// it promises of its own: refusals with numbers, failures that are latched and hang nothing, memory that is pinned.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/cuda/cuda_device.h>
#include <ballast/cuda/describe.h>
#include <ballast/offload/device_registry.h>
#include <standin/standin.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "contract/device_contract.h"
#include "support/sanitizers.h"

namespace ballast::offload {
namespace {

using testing::AllOf;

std::unique_ptr<Device> fresh(std::uint64_t timing_seed) {
  standin::reset();
  standin::configure({.timing_seed = timing_seed});
  return cuda::make_cuda_device();
}

INSTANTIATE_TEST_SUITE_P(Devices, DeviceContract,
                         testing::Values(Kind{"StandIn", [] { return fresh(0); }},
                                         Kind{"StandInSeed1", [] { return fresh(1); }},
                                         Kind{"StandInSeed2", [] { return fresh(2); }}),
                         [](const auto& chosen) { return std::string(chosen.param.name); });

class CudaDeviceTest : public testing::Test {
 protected:
  CudaDeviceTest() { standin::reset(); }
  ~CudaDeviceTest() override { EXPECT_EQ(standin::live().total(), 0u) << "something was not given back"; }
};

template <class Error, class Call>
std::string text_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing of the kind was thrown";
}

TEST_F(CudaDeviceTest, IsNamedAndItsMemoryIsNotTheHosts) {
  const auto device = cuda::make_cuda_device();
  EXPECT_EQ(device->name(), "cuda");
  EXPECT_FALSE(device->host_addressable());
  EXPECT_NE(device->kernels(), nullptr);
  EXPECT_NE(device->make_stream("s")->native_handle(), nullptr);
  std::byte* const slab = device->take_slab(4096);
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  EXPECT_EQ(write(ends[1], slab, 1), -1);  // the kernel cannot read it on our behalf either
  EXPECT_EQ(errno, EFAULT);
  close(ends[0]);
  close(ends[1]);
}

TEST_F(CudaDeviceTest, BytesGoToTheDeviceAndComeBack) {
  const auto device = cuda::make_cuda_device();
  const auto stream = device->make_stream("s");
  std::byte* const slab = device->take_slab(10000);
  std::vector<unsigned char> there(10000), back(10000, 1);
  for (std::size_t i = 0; i < there.size(); ++i) there[i] = static_cast<unsigned char>(base::mix(i));
  stream->copy(slab, there.data(), 10000);
  stream->fill_zero(slab + 5000, 100);
  stream->copy(back.data(), slab, 10000);
  stream->synchronize();
  std::fill(there.begin() + 5000, there.begin() + 5100, 0);
  EXPECT_EQ(back, there);
}

TEST_F(CudaDeviceTest, ClosuresAndTheNullStreamAreRefused) {
  const auto device = cuda::make_cuda_device();
  const auto stream = device->make_stream("maths");
  EXPECT_THAT(text_of<UsageError>([&] { stream->enqueue([] {}); }), AllOf(HasSubstr("maths"), HasSubstr("kernels")));
  EXPECT_THROW(device->adopt_stream(nullptr, "none"), UsageError);
}

TEST_F(CudaDeviceTest, AnAdoptedStreamStaysTheTrainers) {
  const auto device = cuda::make_cuda_device();
  cudaStream_t own = nullptr;
  ASSERT_EQ(cudaStreamCreateWithPriority(&own, cudaStreamNonBlocking, 0), cudaSuccess);
  {
    const auto stream = device->adopt_stream(own, "trainer");
    EXPECT_EQ(stream->native_handle(), own);
    std::atomic<int> seen{0};
    int value = 0;
    ASSERT_EQ(standin::launch(own, [&] { value = 7; }), cudaSuccess);
    run(*stream, [&] { seen = value; });
    stream->synchronize();
    EXPECT_EQ(seen, 7);
  }
  EXPECT_EQ(standin::live().streams, 1u);
  ASSERT_EQ(cudaStreamDestroy(own), cudaSuccess);
}

// A call that waits for what another stream's call does: on CUDA's own host functions this would stand still.
TEST_F(CudaDeviceTest, ACallThatWaitsHoldsItsOwnStreamOnly) {
  const auto device = cuda::make_cuda_device();
  const auto first = device->make_stream("first");
  const auto second = device->make_stream("second");
  std::promise<void> promise;
  auto opened = promise.get_future().share();
  std::atomic<int> order{0};
  run(*first, [opened] { opened.wait(); });
  run(*first, [&] { EXPECT_EQ(order++, 1); });
  run(*second, [&] {
    EXPECT_EQ(order++, 0);
    promise.set_value();
  });
  first->synchronize();
  second->synchronize();
  EXPECT_EQ(order, 2);
}

TEST_F(CudaDeviceTest, ANotificationComesInOrderAndHoldsNothing) {
  const auto device = cuda::make_cuda_device();
  const auto stream = device->make_stream("s");
  std::promise<void> promise;
  auto opened = promise.get_future().share();
  std::vector<int> seen;
  struct Context {
    std::shared_future<void> opened;
    std::vector<int>* seen;
  } context{opened, &seen};
  stream->notify({[](void* c, std::uint64_t) {
                    auto& own = *static_cast<Context*>(c);
                    own.opened.wait();
                    own.seen->push_back(1);
                  },
                  &context, 0});
  std::atomic<bool> ran{false};
  ASSERT_EQ(standin::launch(static_cast<cudaStream_t>(stream->native_handle()), [&] { ran = true; }), cudaSuccess);
  while (!ran) std::this_thread::yield();  // later work of the device goes on
  run(*stream, [&] { seen.push_back(2); });
  promise.set_value();
  stream->synchronize();
  EXPECT_EQ(seen, (std::vector<int>{1, 2}));
}

TEST_F(CudaDeviceTest, MoreMemoryThanThereIsIsRefusedWithTheNumbers) {
  standin::configure({.device_bytes = 64 * kMiB});
  const auto device = cuda::make_cuda_device();
  EXPECT_LT(device->capacity_bytes(), 64 * kMiB);
  EXPECT_GT(device->capacity_bytes(), 63 * kMiB);
  EXPECT_THAT(text_of<PlanError>([&] { device->take_slab(100 * kMiB); }),
              AllOf(HasSubstr("104857600 bytes"), HasSubstr("67108864 bytes"), HasSubstr("budget.device"),
                    HasSubstr("stand-in 0")));
  EXPECT_NE(device->take_slab(device->capacity_bytes()), nullptr);  // a refusal takes nothing
}

TEST_F(CudaDeviceTest, WithoutADeviceTheConfigurationIsRefused) {
  standin::configure({.devices = 0});
  EXPECT_THAT(text_of<ConfigError>([] { cuda::make_cuda_device(); }),
              AllOf(HasSubstr("cudaErrorNoDevice"), HasSubstr("\"host\"")));
  cuda::register_device();
  EXPECT_EQ(automatic_device(), "host");
  standin::configure({.devices = 2});
  EXPECT_EQ(automatic_device(), "cuda");
  EXPECT_THAT(text_of<ConfigError>([] { cuda::make_cuda_device({.device = 2}); }), HasSubstr("shows 2"));
  EXPECT_EQ(device_backend("cuda").make(3)->name(), "cuda");
  EXPECT_THROW(device_backend("rocket"), ConfigError);
}

TEST_F(CudaDeviceTest, TheNumaNodeIsThatOfThePciDevice) {
  const std::string root = testing::TempDir() + "/ballast-sysfs-" + std::to_string(getpid());
  std::filesystem::create_directories(root + "/bus/pci/devices/0000:a1:00.0");
  std::ofstream(root + "/bus/pci/devices/0000:a1:00.0/numa_node") << "3\n";
  standin::configure({.devices = 2});
  EXPECT_EQ(cuda::make_cuda_device({.device = 1, .sysfs_root = root})->numa_node(), 3);
  EXPECT_EQ(cuda::make_cuda_device({.device = 0, .sysfs_root = root})->numa_node(), -1);
  std::filesystem::remove_all(root);
}

TEST_F(CudaDeviceTest, TheDescriptionTellsMemoryLinkNodeAndTrouble) {
  const std::string root = testing::TempDir() + "/ballast-sysfs-describe-" + std::to_string(getpid());
  const std::string folder = root + "/bus/pci/devices/0000:a0:00.0/";
  std::filesystem::create_directories(folder);
  std::ofstream(folder + "numa_node") << "1\n";
  std::ofstream(folder + "max_link_speed") << "32.0 GT/s PCIe\n";
  std::ofstream(folder + "current_link_speed") << "2.5 GT/s PCIe\n";
  std::ofstream(folder + "max_link_width") << "16\n";
  std::ofstream(folder + "current_link_width") << "8\n";
  standin::configure({.devices = 2, .device_bytes = 64 * kMiB});
  standin::fail("cudaMemGetInfo", 2, cudaErrorECCUncorrectable);
  const cuda::Description all = cuda::describe(root);
  std::filesystem::remove_all(root);
  EXPECT_EQ(all.runtime_version, 13000);
  EXPECT_EQ(all.driver_version, 13010);
  EXPECT_EQ(all.trouble, "");
  ASSERT_EQ(all.devices.size(), 2u);
  const cuda::DeviceDescription& first = all.devices[0];
  EXPECT_EQ(first.name, "stand-in 0");
  EXPECT_EQ(first.compute_major, 9);
  EXPECT_EQ(first.memory_bytes, 64 * kMiB);
  EXPECT_EQ(first.free_bytes, 64 * kMiB);
  EXPECT_EQ(first.pci, "0000:a0:00.0");
  EXPECT_EQ(first.numa_node, 1);
  EXPECT_EQ(first.link_speed_most, "32.0 GT/s PCIe");
  EXPECT_EQ(first.link_speed_now, "2.5 GT/s PCIe");
  EXPECT_EQ(first.link_width_most, 16);
  EXPECT_EQ(first.link_width_now, 8);
  EXPECT_EQ(first.trouble, "");
  EXPECT_EQ(all.devices[1].numa_node, -1);
  EXPECT_EQ(all.devices[1].link_speed_most, "");
  EXPECT_THAT(all.devices[1].trouble, AllOf(HasSubstr("cudaMemGetInfo"), HasSubstr("cudaErrorECCUncorrectable")));

  standin::reset();
  standin::configure({.devices = 0});
  EXPECT_THAT(cuda::describe().trouble, HasSubstr("cudaErrorNoDevice"));
}

TEST_F(CudaDeviceTest, PinnedMemoryIsCopiedWithoutBlockingAndReadWhenTheCopyRuns) {
  const auto device = cuda::make_cuda_device({.pin_piece_bytes = 8192});
  const auto stream = device->make_stream("s");
  std::byte* const slab = device->take_slab(100000);
  std::vector<std::byte> memory(100000, std::byte{1}), other(100000);
  device->register_host_memory(memory);
  EXPECT_EQ(standin::calls("cudaHostRegister"), 13u);
  Gate gate;
  gate.hold(*stream);
  // Across the borders of pieces, from an odd place; must return while the stream is held.
  stream->copy(slab + 5, memory.data() + 5, memory.size() - 10);
  std::fill(memory.begin(), memory.end(), std::byte{2});
  gate.open();
  stream->copy(other.data(), slab, other.size());
  stream->synchronize();
  EXPECT_EQ(other[5], std::byte{2});
  EXPECT_EQ(other[99994], std::byte{2});
  device->unregister_host_memory(memory);
}

// What the random timings are for: the same two streams with the wait left out are caught.
TEST_F(CudaDeviceTest, AMissingWaitShowsInSomeOrderAndAKeptOneInNone) {
  for (const bool waits : {true, false}) {
    if (!waits && test::kUnderThreadSanitizer) continue;  // a race on purpose, which the sanitizer reports
    int wrong = 0;
    for (std::uint64_t seed = 1; seed <= 60; ++seed) {
      standin::reset();
      standin::configure({.timing_seed = seed});
      const auto device = cuda::make_cuda_device();
      const auto first = device->make_stream("first");
      const auto second = device->make_stream("second");
      const auto event = device->make_event();
      std::byte* const slab = device->take_slab(8192);
      std::vector<std::byte> memory(4096, std::byte{7}), back(4096);
      device->register_host_memory(memory);
      second->fill_zero(slab, 4096);
      second->synchronize();
      first->copy(slab, memory.data(), 4096);
      first->record(*event);
      if (waits) second->wait(*event);
      second->copy(back.data(), slab, 4096);
      second->synchronize();
      first->synchronize();
      wrong += back[0] != std::byte{7} || back[4095] != std::byte{7};
      device->unregister_host_memory(memory);
    }
    if (waits) {
      EXPECT_EQ(wrong, 0);
    } else {
      EXPECT_GT(wrong, 0);
    }
  }
}

TEST_F(CudaDeviceTest, MemoryThatCannotBePinnedIsRefusedAndNothingStaysPinned) {
  const auto device = cuda::make_cuda_device({.pin_piece_bytes = 8192});
  std::vector<std::byte> memory(100000);
  standin::fail("cudaHostRegister", 5, cudaErrorMemoryAllocation);
  EXPECT_THAT(text_of<PlanError>([&] { device->register_host_memory(memory); }),
              AllOf(HasSubstr("100000 bytes"), HasSubstr("byte 32768"), HasSubstr("budget.host")));
  EXPECT_EQ(standin::live().pinned_ranges, 0u);
}

TEST_F(CudaDeviceTest, ADeadDeviceIsReportedByNameAndHangsNothing) {
  for (const char* function : {"execution", "cudaMemcpyAsync", "cudaEventRecord", "cudaStreamWaitEvent",
                               "cudaEventSynchronize", "cuStreamWaitValue32", "cudaStreamSynchronize"}) {
    SCOPED_TRACE(function);
    standin::reset();
    const auto device = cuda::make_cuda_device();
    std::vector<std::string> told;
    device->set_failure_handler([&](std::exception_ptr failure) {
      try {
        std::rethrow_exception(failure);
      } catch (const IoError& error) {
        told.emplace_back(error.what());
      }
    });
    {
      const auto stream = device->make_stream("lane");
      const auto other = device->make_stream("other");
      const auto event = device->make_event();
      std::byte* const slab = device->take_slab(4096);
      std::vector<std::byte> memory(4096);
      device->register_host_memory(memory);
      standin::fail(function, 1, cudaErrorIllegalAddress);
      std::atomic<int> calls{0};
      stream->copy(slab, memory.data(), 4096);
      stream->record(*event);
      other->wait(*event);
      run(*stream, [&] { ++calls; });
      run(*other, [&] { ++calls; });
      EXPECT_THAT(text_of<IoError>([&] { stream->synchronize(); }),
                  AllOf(HasSubstr("cudaErrorIllegalAddress (700)"), HasSubstr("stand-in 0"), HasSubstr("committed")));
      EXPECT_THROW(other->synchronize(), IoError);
      EXPECT_THROW(event->synchronize(), IoError);
      EXPECT_TRUE(event->reached());
      EXPECT_EQ(calls, 2);  // whoever waits for a call is not left waiting
      EXPECT_EQ(told.size(), 1u);
      device->unregister_host_memory(memory);
    }
    device->set_failure_handler({});
  }
}

TEST_F(CudaDeviceTest, ACallThatFailsOnceIsLatchedToo) {
  const auto device = cuda::make_cuda_device();
  const auto stream = device->make_stream("lane");
  std::byte* const slab = device->take_slab(4096);
  standin::fail("cudaMemcpyAsync", 2, cudaErrorInvalidValue);
  std::vector<std::byte> memory(4096);
  stream->copy(slab, memory.data(), 4096);
  stream->copy(slab, memory.data(), 4096);
  EXPECT_THAT(text_of<IoError>([&] { stream->synchronize(); }),
              AllOf(HasSubstr("cudaMemcpyAsync"), HasSubstr("\"lane\""), HasSubstr("4096 bytes"),
                    HasSubstr("cudaErrorInvalidValue (1)")));
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);  // left clean for the trainer's own checks
}

// Every call that setting up makes, failing once: a typed error that names it, nothing left behind.
TEST_F(CudaDeviceTest, EachCallOfSettingUpMayFail) {
  const auto set_up = [] {
    const auto device = cuda::make_cuda_device({.pin_piece_bytes = 8192});
    const auto stream = device->make_stream("s");
    const auto event = device->make_event();
    device->take_slab(10000);
    std::vector<std::byte> memory(20000);
    device->register_host_memory(memory);
    device->unregister_host_memory(memory);
  };
  std::size_t failures = 0;
  for (const char* function :
       {"cudaGetDeviceCount", "cudaGetDeviceProperties", "cudaDeviceGetAttribute", "cudaGetDriverEntryPointByVersion",
        "cudaGetDevice", "cudaMalloc", "cudaEventCreateWithFlags", "cudaDeviceGetStreamPriorityRange",
        "cudaStreamCreateWithPriority", "cudaHostAlloc", "cudaMemGetInfo", "cudaHostRegister"}) {
    for (const cudaError_t error : {cudaErrorMemoryAllocation, cudaErrorInvalidValue}) {
      standin::reset();
      set_up();
      const std::uint64_t calls = standin::calls(function);
      ASSERT_GT(calls, 0u) << function;
      for (std::uint64_t nth = 1; nth <= calls; nth += calls < 20 ? 1 : 97) {
        standin::reset();
        standin::fail(function, nth, error);
        SCOPED_TRACE(std::string(function) + ", call " + std::to_string(nth));
        EXPECT_THAT(text_of<Error>(set_up), HasSubstr("cudaError"));
        EXPECT_EQ(standin::live().total(), 0u);
        ++failures;
      }
    }
  }
  EXPECT_GT(failures, 40u);
}

}  // namespace
}  // namespace ballast::offload
