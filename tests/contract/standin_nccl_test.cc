// The contract of communicators over NCCL on the stand-in: with a control communicator, and over NCCL alone.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/communicators/in_process.h>
#include <ballast/communicators/nccl.h>
#include <ballast/cuda/cuda_device.h>
#include <nccl.h>
#include <standin/standin.h>

#include <filesystem>

#include "communicator_contract.h"

namespace ballast::testing {

namespace {

const bool kOnCuda = [] {
  make_rank_device = [] { return cuda::make_cuda_device(); };
  return true;
}();

enum class Control { none, threads };

void run_world(int size, Control with, std::chrono::milliseconds timeout, const Body& body) {
  standin::reset();
  const std::vector<std::byte> id = make_nccl_id();
  std::vector<std::shared_ptr<Communicator>> controls(at(size));
  if (with == Control::threads) controls = make_in_process_communicators(size, {.timeout = timeout});
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank, control = std::move(controls[at(rank)])]() mutable {
      NcclOptions options;
      options.communicator.timeout = timeout;
      options.control = std::move(control);
      auto own = make_nccl_communicator(options, rank, size, id);
      options.control.reset();
      body(*own);
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(standin::live().total(), 0U) << "something was not given back";
}

}  // namespace

std::vector<World> worlds() {
  std::vector<World> all;
  for (const int size : {1, 2, 3, 4}) {
    for (const Control with : {Control::none, Control::threads}) {
      all.push_back(
          {(with == Control::none ? "nccl_" : "nccl_and_threads_") + std::to_string(size), size,
           [size, with](std::chrono::milliseconds timeout, const Body& body) { run_world(size, with, timeout, body); },
           with == Control::threads || size == 1, true});
    }
  }
  return all;
}

namespace {

TEST(NcclCommunicator, AStreamOfAnotherDeviceIsRefused) {
  run_world(1, Control::none, kPatient, [](Communicator& c) {
    const auto device = offload::make_host_device();
    const auto stream = device->make_stream("host");
    std::vector<std::byte> data(16);
    EXPECT_THROW(c.all_gather(data.data(), 16, *stream), UsageError);
    EXPECT_EQ(c.name(), "nccl");
    c.check();
  });
}

TEST(NcclCommunicator, ARankMissingFromALargeCallEndsEveryRankWithinTheTimeout) {
  for (const Control with : {Control::none, Control::threads}) {
    run_world(3, with, kShort, [&](Communicator& c) {
      const auto begin = std::chrono::steady_clock::now();
      if (c.rank() == 1) {
        std::this_thread::sleep_for(kShort * 4);
        EXPECT_THROW(c.barrier(), CommunicationError);
        return;
      }
      RankStream stream;
      std::vector<std::byte> data(3000);
      c.all_gather(data.data(), 1000, *stream);
      stream->synchronize();
      std::string text;
      while (text.empty()) {
        try {
          c.check();
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
        } catch (const CommunicationError& error) {
          text = error.what();
        }
      }
      EXPECT_THAT(text, ::testing::HasSubstr("all-gather of 1000 bytes"));
      if (with == Control::threads) {
        EXPECT_THAT(text, ::testing::HasSubstr("rank 1 did not come"));
      }
      EXPECT_THROW(c.all_gather(data.data(), 1000, *stream), CommunicationError);
      EXPECT_LT(std::chrono::steady_clock::now() - begin, kShort * 3 + std::chrono::seconds(5));
    });
  }
}

// One rank is inside a split that the other left with an error: what it asks about must not be freed under it.
TEST(NcclCommunicator, AnAbortByAnotherThreadEndsASplitWithItsReason) {
  for (int delay_us = 0; delay_us < 2000; delay_us += 100) {
    std::atomic<int> left{0};
    run_world(2, Control::none, kPatient, [&](Communicator& c) {
      c.barrier();
      if (c.rank() == 0) standin::fail("ncclCommSplit", 1, cudaErrorUnknown);
      c.barrier();
      std::thread other([&] {
        while (left == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
        std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
        c.abort("told to");
      });
      const std::string text = failure_of([&] { static_cast<void>(c.split(0)); });
      const bool first = left++ == 0;
      EXPECT_THAT(text, ::testing::HasSubstr(first ? "ncclCommSplit failed" : "told to"));
      other.join();
    });
  }
}

TEST(NcclCommunicator, RanksThatMakeDifferentSmallCallsAreNamed) {
  for (const Control with : {Control::none, Control::threads}) {
    run_world(3, with, kPatient, [](Communicator& c) {
      c.barrier();
      double one = 1.0;
      const std::string text = failure_of([&] { c.rank() == 2 ? c.barrier() : c.all_reduce_sum({&one, 1}); });
      EXPECT_THAT(text, ::testing::HasSubstr("rank 2 made"));
    });
  }
}

TEST(NcclCommunicator, FailuresOfNcclAreLatchedByName) {
  for (const char* function : {"ncclAllGather", "ncclReduceScatter", "ncclAllReduce", "ncclCommGetAsyncError"}) {
    SCOPED_TRACE(function);
    run_world(1, Control::none, kPatient, [&](Communicator& c) {
      std::vector<std::byte> data(4000);
      RankStream stream;  // ends its work before the data goes
      standin::fail(function, 1, cudaErrorUnknown);
      std::string text;
      while (text.empty()) {
        try {
          c.all_gather(data.data(), 4000, *stream);
          c.reduce_scatter_sum(data.data(), data.data(), 1000, DataType::fp32, *stream);
          c.all_reduce_sum(data.data(), 1000, DataType::fp32, *stream);
          c.check();
        } catch (const CommunicationError& error) {
          text = error.what();
        }
      }
      EXPECT_THAT(text, ::testing::AllOf(::testing::HasSubstr("rank 0"), ::testing::HasSubstr("system error (2)")));
      EXPECT_EQ(failure_of([&] { c.check(); }), text);
    });
  }
  for (const char* function : {"ncclGetUniqueId", "ncclCommInitRankConfig", "ncclCommSplit", "cudaMalloc"}) {
    SCOPED_TRACE(function);
    standin::reset();
    const std::vector<std::byte> good = make_nccl_id();
    standin::fail(function, 1, cudaErrorUnknown);
    EXPECT_THROW(make_nccl_communicator({}, 0, 1, std::string(function) == "ncclGetUniqueId" ? make_nccl_id() : good),
                 CommunicationError);
    EXPECT_EQ(standin::live().total(), 0U);
  }
}

TEST(NcclCommunicator, DeviceMemoryIsRegisteredOnceAndGivenBackOnce) {
  run_world(2, Control::threads, kPatient, [](Communicator& c) {
    const auto device = cuda::make_cuda_device();
    const std::span<std::byte> slab(device->take_slab(1 << 16), 1 << 16);
    std::vector<std::byte> host(4096);
    std::string reason;
    const auto own = c.duplicate();
    c.barrier();
    EXPECT_TRUE(own->register_buffer(slab, &reason)) << reason;
    EXPECT_FALSE(own->register_buffer(host, &reason));
    EXPECT_THAT(reason, ::testing::HasSubstr("ncclCommRegister failed"));
    c.barrier();
    EXPECT_EQ(standin::live().registrations, 2U);
    c.barrier();
    RankStream stream;
    own->all_gather(slab.data(), 1024, *stream);
    stream->synchronize();
    own->unregister_buffer(slab);
    own->unregister_buffer(slab);  // not registered any more: nothing
    own->unregister_buffer(host);
    own->check();
    c.barrier();
    EXPECT_EQ(standin::live().registrations, 0U);
    c.barrier();
    // What was not given back goes with its communicator, whether that ends well or not.
    EXPECT_TRUE(own->register_buffer(slab, &reason)) << reason;
    EXPECT_TRUE(c.register_buffer(slab, nullptr));
    c.barrier();
    if (c.rank() == 0) own->abort("to see what stays");
    EXPECT_THAT(failure_of([&] { own->barrier(); }), ::testing::HasSubstr("to see what stays"));
    EXPECT_THROW(own->register_buffer(slab, &reason), CommunicationError);
    own->unregister_buffer(slab);
    c.unregister_buffer(slab);  // before the device and its memory go
  });
}

TEST(NcclCommunicator, TheStandInRefusesWhatWouldRegisterOrGiveBackWrongly) {
  standin::reset();
  ncclUniqueId id;
  ncclComm_t comm = nullptr;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  ASSERT_EQ(ncclCommInitRankConfig(&comm, 1, id, 0, &config), ncclInProgress);
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, 4096), cudaSuccess);
  void* handle = nullptr;
  std::byte host[64];
  EXPECT_EQ(ncclCommRegister(comm, host, sizeof host, &handle), ncclInvalidArgument);
  EXPECT_EQ(ncclCommRegister(comm, memory, 4097, &handle), ncclInvalidArgument);  // beyond its end
  ASSERT_EQ(ncclCommRegister(comm, memory, 4096, &handle), ncclSuccess);
  EXPECT_EQ(cudaFree(memory), cudaErrorInvalidValue);  // still referred to
  EXPECT_EQ(ncclCommDeregister(comm, handle), ncclSuccess);
  EXPECT_EQ(ncclCommDeregister(comm, handle), ncclInvalidArgument);
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
  EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  EXPECT_EQ(standin::live().total(), 0U) << to_string(standin::live());
}

TEST(NcclCommunicator, AWorldThatIsNotCompleteEndsWithinTheTimeout) {
  standin::reset();
  NcclOptions options;
  options.communicator.timeout = kShort;
  EXPECT_THAT(failure_of([&] { make_nccl_communicator(options, 1, 2, make_nccl_id()); }),
              ::testing::AllOf(::testing::HasSubstr("rank 1"), ::testing::HasSubstr("2 ranks")));
  EXPECT_EQ(standin::live().total(), 0U);
}

LaunchInfo torchrun(int rank, int world_size, int port) {
  LaunchInfo launch;
  launch.launcher = Launcher::environment;
  launch.rank = rank;
  launch.world_size = world_size;
  launch.local_rank = rank;
  launch.local_world_size = world_size;
  launch.master_address = "localhost";
  launch.master_port = port;
  return launch;
}

TEST(NcclCommunicator, TheIdGoesOverTcpAndAFreshRunTakesThePortOver) {
  standin::reset();
  standin::configure({.devices = 4});
  const int port = 20000 + static_cast<int>(getpid() % 20000);
  for (int round = 0; round < 3; ++round) {
    std::vector<std::thread> threads;
    for (int rank = 3; rank >= 0; --rank) {
      threads.emplace_back([=] {
        const auto c = make_nccl_communicator({.timeout = kPatient}, torchrun(rank, 4, port), nullptr);
        double one = rank;
        c->all_reduce_sum({&one, 1});
        EXPECT_EQ(one, 6);
      });
    }
    for (auto& thread : threads) thread.join();
  }
  EXPECT_THAT(failure_of([&] { make_nccl_communicator({.timeout = kShort}, torchrun(0, 3, port), nullptr); }),
              ::testing::HasSubstr("not to rank 1, 2"));
  EXPECT_THAT(failure_of([&] { make_nccl_communicator({.timeout = kShort}, torchrun(1, 3, port), nullptr); }),
              ::testing::AllOf(::testing::HasSubstr("localhost:" + std::to_string(port + 1)),
                               ::testing::HasSubstr("MASTER_ADDR")));
  EXPECT_THROW(make_nccl_communicator({.timeout = kShort}, torchrun(0, 5, port), nullptr), ConfigError);
  EXPECT_EQ(standin::live().total(), 0U);
}

TEST(NcclCommunicator, TheMasterIsFoundByNameAndByAddressOfEitherFamilyAndToldWhereItIsNot) {
  standin::reset();
  standin::configure({.devices = 2});
  const int port = 20000 + static_cast<int>((getpid() + 7) % 20000);
  std::vector<std::string> addresses = {"localhost", "127.0.0.1"};
  if (std::filesystem::exists("/proc/net/if_inet6") && !std::filesystem::is_empty("/proc/net/if_inet6"))
    addresses.emplace_back("::1");
  for (const std::string& address : addresses) {
    SCOPED_TRACE(address);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank) {
      threads.emplace_back([=] {
        LaunchInfo launch = torchrun(rank, 2, port);
        launch.master_address = address;
        const auto c = make_nccl_communicator({.timeout = kPatient}, launch, nullptr);
        double one = 1;
        c->all_reduce_sum({&one, 1});
        EXPECT_EQ(one, 2);
      });
    }
    for (auto& thread : threads) thread.join();
  }
  // Unknown names are given up on before the time is over; nobody behind a port is waited for.
  for (const auto& [address, least] : {std::pair("no-such-machine.invalid", 0.3), std::pair("127.0.0.1", 0.9)}) {
    LaunchInfo launch = torchrun(1, 2, port);
    launch.master_address = address;
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_THAT(failure_of([&] { make_nccl_communicator({.timeout = kShort}, launch, nullptr); }),
                ::testing::HasSubstr(address + (":" + std::to_string(port + 1))));
    EXPECT_GE(std::chrono::steady_clock::now() - begin, least * kShort);
  }
  // Two jobs on one port: the second is refused.
  std::thread first([=] {
    EXPECT_THAT(failure_of([&] { make_nccl_communicator({.timeout = kShort * 2}, torchrun(0, 2, port), nullptr); }),
                ::testing::HasSubstr("not to rank 1"));
  });
  std::this_thread::sleep_for(kShort / 2);
  EXPECT_THAT(failure_of([&] { make_nccl_communicator({.timeout = kShort}, torchrun(0, 2, port), nullptr); }),
              ::testing::AllOf(::testing::HasSubstr("cannot listen"), ::testing::HasSubstr("MASTER_PORT")));
  first.join();
  EXPECT_EQ(standin::live().total(), 0U);
}

}  // namespace
}  // namespace ballast::testing
