// The public face of communicators over NCCL, and how they are made.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/offload/device.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "id_exchange.h"
#include "nccl_state.h"

namespace ballast {

using communicators::CallKind;
using communicators::Members;
using communicators::NcclState;
using communicators::Signature;

namespace {

ncclDataType_t nccl_type(DataType type) {
  switch (type) {
    case DataType::bf16:
      return ncclBfloat16;
    case DataType::fp16:
      return ncclFloat16;
    case DataType::fp32:
      break;
  }
  return ncclFloat32;
}

cudaStream_t handle(offload::Stream& stream) {
  void* const native = stream.native_handle();
  if (native == nullptr)
    throw UsageError("NCCL works on streams of a CUDA device, and was given one of another device");
  return static_cast<cudaStream_t>(native);
}

class NcclCommunicator final : public Communicator {
 public:
  explicit NcclCommunicator(std::shared_ptr<NcclState> state) : state_(std::move(state)) {}

  std::string_view name() const override { return "nccl"; }
  int world_size() const override { return state_->members().count(); }
  int rank() const override { return state_->members().rank(); }

  void all_reduce_sum(std::span<double> values) override {
    if (Communicator* control = state_->control()) return over(*control, [&] { control->all_reduce_sum(values); });
    std::vector<double> all(values.size() * ranks());
    state_->gather(signature(CallKind::sum_values, values.size_bytes()), std::as_bytes(values),
                   std::as_writable_bytes(std::span(all)));
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = all[i];
      for (std::size_t r = 1; r < ranks(); ++r) values[i] += all[r * values.size() + i];
    }
  }

  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    if (mine.size() * ranks() != all.size()) {
      throw UsageError("all_gather of " + std::to_string(mine.size()) + " bytes a rank into " +
                       std::to_string(all.size()) + " bytes for " + std::to_string(world_size()) + " ranks");
    }
    if (Communicator* control = state_->control()) return over(*control, [&] { control->all_gather(mine, all); });
    state_->gather(signature(CallKind::gather_bytes, mine.size()), mine, all);
  }

  void broadcast(std::span<std::byte> data, int root) override {
    if (root < 0 || root >= world_size()) {
      throw UsageError("broadcast from rank " + std::to_string(root) + " of " + std::to_string(world_size()));
    }
    if (Communicator* control = state_->control()) return over(*control, [&] { control->broadcast(data, root); });
    std::vector<std::byte> all(data.size() * ranks());
    state_->gather(signature(CallKind::broadcast, data.size(), DataType::fp32, root), data, all);
    if (!data.empty()) std::memcpy(data.data(), all.data() + static_cast<std::size_t>(root) * data.size(), data.size());
  }

  void barrier() override {
    if (Communicator* control = state_->control()) return over(*control, [&] { control->barrier(); });
    state_->gather(signature(CallKind::barrier, 0), {}, {});
  }

  // For the words about a call that does not end.
  void set_unit(std::uint32_t unit) override { unit_ = unit; }
  void all_gather(std::byte* data, std::size_t part_bytes, offload::Stream& stream) override {
    const Signature s = large_signature(CallKind::all_gather, part_bytes);
    if (part_bytes == 0) return state_->check();
    state_->run_on(handle(stream), NcclState::Large::all_gather, s, data + own() * part_bytes, data, part_bytes,
                   ncclUint8);
  }
  void reduce_scatter_sum(const std::byte* data, std::byte* part, std::size_t part_elements, DataType type,
                          offload::Stream& stream) override {
    require_product(part_elements, ranks() * 4, "reduce_scatter_sum");
    const Signature s = large_signature(CallKind::reduce_scatter, part_elements * element_bytes(type), type);
    if (part_elements == 0) return state_->check();
    state_->run_on(handle(stream), NcclState::Large::reduce_scatter, s, data, part, part_elements, nccl_type(type));
  }
  void all_reduce_sum(std::byte* data, std::size_t elements, DataType type, offload::Stream& stream) override {
    require_product(elements, 4, "all_reduce_sum");
    const Signature s = large_signature(CallKind::all_reduce, elements * element_bytes(type), type);
    if (elements == 0) return state_->check();
    state_->run_on(handle(stream), NcclState::Large::all_reduce, s, data, data, elements, nccl_type(type));
  }

  bool register_buffer(std::span<std::byte> buffer, std::string* reason) override {
    return state_->register_buffer(buffer, reason);
  }
  void unregister_buffer(std::span<std::byte> buffer) noexcept override { state_->unregister_buffer(buffer); }

  std::shared_ptr<Communicator> duplicate() override { return divide(0, false); }
  std::shared_ptr<Communicator> split(int color) override { return divide(color, true); }
  void check() const override { state_->check(); }
  void abort(std::string_view reason) noexcept override { state_->abort(reason); }

 private:
  std::size_t ranks() const { return static_cast<std::size_t>(world_size()); }
  std::size_t own() const { return static_cast<std::size_t>(rank()); }

  Signature signature(CallKind kind, std::size_t bytes, DataType type = DataType::fp32, int root = 0) {
    Signature s;
    s.sequence = state_->next_sequence();
    s.bytes = bytes;
    s.root = root;
    s.kind = kind;
    s.type = type;
    return s;
  }
  Signature large_signature(CallKind kind, std::size_t bytes, DataType type = DataType::fp32) {
    Signature s = signature(kind, bytes, type);
    s.unit = unit_;
    return s;
  }
  static void require_product(std::size_t a, std::size_t b, const char* call) {
    if (a > std::numeric_limits<std::size_t>::max() / b) {
      throw UsageError(std::string(call) + " of " + std::to_string(a) + " does not fit an address space");
    }
  }

  // A failure of the control communicator is one of this.
  template <class Call>
  void over(Communicator&, const Call& call) {
    state_->check();
    try {
      call();
    } catch (const CommunicationError& error) {
      state_->fail(error.what(), false);
      throw;
    }
  }

  std::shared_ptr<Communicator> divide(int color, bool splits) {
    state_->check();
    // NCCL's colors are not negative: the lowest rank of a group stands for it.
    std::vector<int> colors(ranks());
    all_gather(std::as_bytes(std::span(&color, 1)), std::as_writable_bytes(std::span(colors)));
    std::vector<int> world_ranks;
    int place = 0;
    for (int r = 0; r < world_size(); ++r) {
      if (colors[static_cast<std::size_t>(r)] != color) continue;
      if (r == rank()) place = static_cast<int>(world_ranks.size());
      world_ranks.push_back(state_->members().world_rank(r));
    }
    const auto lowest = std::find(colors.begin(), colors.end(), color) - colors.begin();
    std::shared_ptr<Communicator> control;
    if (Communicator* own_control = state_->control()) {
      over(*own_control, [&] { control = splits ? own_control->split(color) : own_control->duplicate(); });
    }
    return std::make_shared<NcclCommunicator>(
        state_->split(static_cast<int>(lowest), Members(std::move(world_ranks), place), std::move(control)));
  }

  const std::shared_ptr<NcclState> state_;
  std::uint32_t unit_ = communicators::kNoUnit;  // of large calls
};

Members whole_world(int rank, int world_size) {
  std::vector<int> ranks(static_cast<std::size_t>(world_size));
  for (int r = 0; r < world_size; ++r) ranks[static_cast<std::size_t>(r)] = r;
  return {std::move(ranks), rank};
}

void require_same_world(const NcclOptions& options, int rank, int world_size) {
  const auto& control = options.control;
  if (control == nullptr || (control->rank() == rank && control->world_size() == world_size)) return;
  throw UsageError("NCCL's rank " + std::to_string(rank) + " of " + std::to_string(world_size) +
                   " was given a control communicator as rank " + std::to_string(control->rank()) + " of " +
                   std::to_string(control->world_size()));
}

int current_device(int wanted) {
  int device = wanted;
  const char* call = "cudaGetDevice";
  cudaError_t result = device < 0 ? cudaGetDevice(&device) : cudaSuccess;
  if (result == cudaSuccess) {
    call = "cudaSetDevice";
    result = cudaSetDevice(device);
  }
  if (result == cudaSuccess) return device;
  static_cast<void>(cudaGetLastError());
  throw ConfigError("CUDA device " + (device < 0 ? "(the current one)" : std::to_string(device)) +
                    " cannot be used by NCCL: " + call + " failed: " + cudaGetErrorName(result) + ", " +
                    cudaGetErrorString(result));
}

std::shared_ptr<Communicator> started(std::shared_ptr<NcclState> state) {
  state->start();
  return std::make_shared<NcclCommunicator>(std::move(state));
}

}  // namespace

int nccl_version() {
  int version = 0;
  return ncclGetVersion(&version) == ncclSuccess ? version : 0;
}

std::vector<std::byte> make_nccl_id() {
  ncclUniqueId id;
  const ncclResult_t result = ncclGetUniqueId(&id);
  if (result != ncclSuccess) throw CommunicationError(communicators::nccl_text("ncclGetUniqueId", result, nullptr));
  std::vector<std::byte> bytes(sizeof id);
  std::memcpy(bytes.data(), &id, sizeof id);
  return bytes;
}

std::shared_ptr<Communicator> make_nccl_communicator(const NcclOptions& options, int rank, int world_size,
                                                     std::span<const std::byte> id) {
  ncclUniqueId unique;
  if (id.size() != sizeof unique) {
    throw UsageError("an NCCL id of " + std::to_string(id.size()) + " bytes; it has " + std::to_string(sizeof unique));
  }
  if (world_size < 1 || rank < 0 || rank >= world_size) {
    throw UsageError("rank " + std::to_string(rank) + " of " + std::to_string(world_size));
  }
  require_same_world(options, rank, world_size);
  std::memcpy(&unique, id.data(), sizeof unique);
  const auto timeout = communicators::effective_timeout(options.communicator);
  const int device = current_device(options.device);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclComm_t comm = nullptr;
  ncclResult_t ready = ncclCommInitRankConfig(&comm, world_size, unique, rank, &config);
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (ready == ncclInProgress && std::chrono::steady_clock::now() <= deadline) {
    ready = communicators::settled(comm, ready, std::chrono::milliseconds(10));
    if (options.control == nullptr) continue;
    try {
      options.control->check();  // another rank may have given up on the way here
    } catch (const CommunicationError&) {
      if (comm != nullptr) static_cast<void>(ncclCommAbort(comm));
      throw;
    }
  }
  if (ready != ncclSuccess) {
    const std::string text =
        ready == ncclInProgress
            ? "rank " + std::to_string(rank) + " waited " + communicators::format_seconds(timeout) + " for " +
                  std::to_string(world_size) + " ranks to start NCCL; see what became of the others"
            : "rank " + std::to_string(rank) + ": " + communicators::nccl_text("ncclCommInitRankConfig", ready, comm);
    if (comm != nullptr) static_cast<void>(ncclCommAbort(comm));
    throw CommunicationError(text);
  }
  return started(
      std::make_shared<NcclState>(comm, true, whole_world(rank, world_size), device, timeout, options.control));
}

std::shared_ptr<Communicator> adopt_nccl_communicator(void* nccl_comm, const NcclOptions& options) {
  if (nccl_comm == nullptr) throw UsageError("a null ncclComm_t");
  const auto comm = static_cast<ncclComm_t>(nccl_comm);
  int rank = 0;
  int world_size = 0;
  int device = 0;
  const std::pair<const char*, ncclResult_t> asked[] = {{"ncclCommUserRank", ncclCommUserRank(comm, &rank)},
                                                        {"ncclCommCount", ncclCommCount(comm, &world_size)},
                                                        {"ncclCommCuDevice", ncclCommCuDevice(comm, &device)}};
  for (const auto& [call, result] : asked) {
    if (result != ncclSuccess) throw CommunicationError(communicators::nccl_text(call, result, comm));
  }
  require_same_world(options, rank, world_size);
  return started(std::make_shared<NcclState>(comm, false, whole_world(rank, world_size), current_device(device),
                                             communicators::effective_timeout(options.communicator), options.control));
}

std::shared_ptr<Communicator> make_nccl_communicator(const CommunicatorOptions& options, const LaunchInfo& launch,
                                                     const std::shared_ptr<Communicator>& bootstrap) {
  NcclOptions nccl;
  nccl.communicator = options;
  nccl.control = bootstrap;
  int count = 0;
  const cudaError_t result = cudaGetDeviceCount(&count);
  if (result != cudaSuccess || count == 0) {
    static_cast<void>(cudaGetLastError());
    throw ConfigError("communication.backend \"nccl\" needs a CUDA device, and CUDA shows none on this machine (" +
                      std::string(cudaGetErrorName(result)) + ")");
  }
  if (launch.local_world_size > count) {
    throw ConfigError(std::to_string(launch.local_world_size) + " ranks on this machine and " + std::to_string(count) +
                      " CUDA devices: NCCL wants a device for each rank (CUDA_VISIBLE_DEVICES?)");
  }
  nccl.device = launch.local_rank % count;
  std::vector<std::byte> id = launch.rank == 0 ? make_nccl_id() : std::vector<std::byte>(sizeof(ncclUniqueId));
  if (bootstrap != nullptr) {
    bootstrap->broadcast(id, 0);
  } else if (launch.world_size > 1) {
    communicators::exchange_from_rank_zero(id, launch.rank, launch.world_size, launch.master_address,
                                           launch.master_port + 1, options.timeout);
  }
  return make_nccl_communicator(nccl, launch.rank, launch.world_size, id);
}

}  // namespace ballast
