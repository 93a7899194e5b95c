// NCCL in the stand-in: ranks are threads of this process. A collective holds its stream until every rank has come to
// it, or until the communicator is aborted; sums are added in rank order, in fp32, and rounded once.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/kernels/convert.h>
#include <nccl.h>

#include <condition_variable>
#include <cstring>
#include <map>

#include "world.h"

namespace {

// One collective, by its place in the order of its communicator.
struct Meeting {
  int come = 0;
  int gone = 0;
  std::vector<const void*> sources;
  std::vector<void*> destinations;
  std::size_t count = 0;
  bool matched = true;
};

struct Group;
// One split of a communicator, by its place among them: over once every rank has come.
struct Split {
  std::vector<int> colors;
  int come = 0;
  std::map<int, std::shared_ptr<Group>> groups;
};

struct Group {
  explicit Group(int size) : ranks(size) {}
  const int ranks;
  std::mutex mutex;
  std::condition_variable changed;
  int joined = 0;
  bool aborted = false;  // by any rank: the others' work never ends, as without that rank
  std::map<std::uint64_t, Meeting> meetings;
  std::map<std::uint64_t, std::shared_ptr<Split>> splits;  // begun, not over
};

struct Groups {
  std::mutex mutex;
  std::uint64_t next = 1;
  std::map<std::uint64_t, std::shared_ptr<Group>> by_id;
};
Groups& groups() {
  static Groups instance;
  return instance;
}

}  // namespace

struct ncclComm {
  std::shared_ptr<Group> group;  // null until the split that makes it is over
  int rank = 0;
  int device = 0;
  std::vector<std::uint64_t> registered;
  std::uint64_t sequence = 0;
  std::uint64_t split_sequence = 0;
  std::shared_ptr<Split> splitting;     // the last one begun
  std::shared_ptr<Group> parent_group;  // with the two below: of the split that makes this one
  std::shared_ptr<Split> made_by;
  int parent_rank = 0;
  // Shared with work on streams, which may outlive the communicator.
  std::shared_ptr<std::atomic<bool>> aborted = std::make_shared<std::atomic<bool>>(false);
};

namespace {

template <standin::FunctionName name>
ncclResult_t entered() {
  const cudaError_t error = standin::enter<name>();
  if (error == cudaSuccess) return ncclSuccess;
  return standin::sticky() != cudaSuccess ? ncclUnhandledCudaError : ncclSystemError;
}
#define STANDIN_NCCL_ENTER(name) \
  if (const ncclResult_t standin_result = entered<name>(); standin_result != ncclSuccess) return standin_result

std::size_t bytes_of(ncclDataType_t type) {
  return type == ncclFloat32 ? 4 : type == ncclFloat16 || type == ncclBfloat16 ? 2 : 1;
}

void widen(const void* source, ncclDataType_t type, float* values, std::size_t count) {
  if (type == ncclFloat32) std::memcpy(values, source, count * 4);
  if (type == ncclBfloat16) ballast::kernels::bf16_to_fp32(static_cast<const std::uint16_t*>(source), values, count);
  if (type == ncclFloat16) ballast::kernels::fp16_to_fp32(static_cast<const std::uint16_t*>(source), values, count);
}
void narrow(const float* values, ncclDataType_t type, void* destination, std::size_t count) {
  if (type == ncclFloat32) std::memcpy(destination, values, count * 4);
  if (type == ncclBfloat16) ballast::kernels::fp32_to_bf16(values, static_cast<std::uint16_t*>(destination), count);
  if (type == ncclFloat16) ballast::kernels::fp32_to_fp16(values, static_cast<std::uint16_t*>(destination), count);
}

enum class Kind { gather, scatter, reduce };

// With everyone there: all of it, by the last to come.
void carry_out(const Meeting& m, Kind kind, std::size_t count, ncclDataType_t type) {
  const std::size_t ranks = m.sources.size();
  const std::size_t bytes = count * bytes_of(type);
  if (kind == Kind::gather) {
    for (std::size_t to = 0; to < ranks; ++to) {
      for (std::size_t from = 0; from < ranks; ++from) {
        std::byte* const destination = static_cast<std::byte*>(m.destinations[to]) + from * bytes;
        // What is in place already is not written: others may read it meanwhile.
        if (destination != m.sources[from]) std::memmove(destination, m.sources[from], bytes);
      }
    }
    return;
  }
  const std::size_t total = kind == Kind::scatter ? count * ranks : count;
  std::vector<float> sum(total), next(total);
  widen(m.sources[0], type, sum.data(), total);
  for (std::size_t r = 1; r < ranks; ++r) {
    widen(m.sources[r], type, next.data(), total);
    for (std::size_t i = 0; i < total; ++i) sum[i] += next[i];
  }
  for (std::size_t r = 0; r < ranks; ++r) {
    narrow(sum.data() + (kind == Kind::scatter ? r * count : 0), type, m.destinations[r], count);
  }
}

ncclResult_t queue(ncclComm_t comm, Kind kind, const void* source, void* destination, std::size_t count,
                   ncclDataType_t type, cudaStream_t stream) {
  const auto work = [group = comm->group, rank = static_cast<std::size_t>(comm->rank), aborted = comm->aborted,
                     place = comm->sequence++, kind, source, destination, count, type] {
    std::unique_lock lock(group->mutex);
    Meeting& m = group->meetings[place];
    m.sources.resize(static_cast<std::size_t>(group->ranks));
    m.destinations.resize(static_cast<std::size_t>(group->ranks));
    m.sources[rank] = standin::host_view(source);
    m.destinations[rank] = standin::host_view(destination);
    if (m.come == 0) m.count = count;
    m.matched &= m.count == count;  // ranks that disagree wait for ever, as on a device
    if (++m.come == group->ranks && m.matched) {
      const std::shared_lock running(standin::execution());
      carry_out(m, kind, count, type);
    }
    group->changed.notify_all();
    const auto over = [&] {
      return (m.come == group->ranks && m.matched) || *aborted || standin::sticky() != cudaSuccess;
    };
    while (!over()) group->changed.wait_for(lock, std::chrono::milliseconds(20));
    // Whoever leaves before it was carried out takes its memory along.
    if (m.come != group->ranks) m.matched = false;
    if (++m.gone == group->ranks) group->meetings.erase(place);
  };
  stream->push([&](CUstream_st::Item& item) {
    item.kind = CUstream_st::Kind::collective;
    item.work = work;
  });
  return ncclSuccess;
}

ncclComm_t make(std::shared_ptr<Group> group, int rank) {
  auto* const comm = new ncclComm;
  comm->group = std::move(group);
  comm->rank = rank;
  comm->device = standin::current_device();
  ++standin::counts().communicators;
  return comm;
}

void unmake(ncclComm_t comm) {
  *comm->aborted = true;
  if (comm->group != nullptr) comm->group->changed.notify_all();
  delete comm;
  --standin::counts().communicators;
}

}  // namespace

extern "C" {

const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclSystemError ? "unhandled system error" : result == ncclRemoteError ? "remote error" : "an error";
}
const char* ncclGetLastError(ncclComm_t) { return "as the stand-in was told"; }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  STANDIN_NCCL_ENTER("ncclGetUniqueId");
  const std::lock_guard lock(groups().mutex);
  std::memset(id, 0, sizeof *id);
  const std::uint64_t number = groups().next++;
  std::memcpy(id->internal, &number, sizeof number);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t*) {
  STANDIN_NCCL_ENTER("ncclCommInitRankConfig");
  std::uint64_t number = 0;
  std::memcpy(&number, id.internal, sizeof number);
  const std::lock_guard lock(groups().mutex);
  auto& group = groups().by_id[number];
  if (group == nullptr) group = std::make_shared<Group>(ranks);
  *comm = make(group, rank);
  const std::lock_guard inner(group->mutex);
  if (++group->joined == ranks) groups().by_id.erase(number);
  return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  if (const ncclResult_t result = entered<"ncclCommGetAsyncError">(); result != ncclSuccess) {
    *state = result;
    return ncclSuccess;
  }
  *state = ncclInProgress;
  if (comm->made_by != nullptr) {
    const std::lock_guard lock(comm->parent_group->mutex);
    const Split& split = *comm->made_by;
    if (split.come != comm->parent_group->ranks) return ncclSuccess;
    const int color = split.colors[static_cast<std::size_t>(comm->parent_rank)];
    for (int r = 0; r < comm->parent_rank; ++r) comm->rank += split.colors[static_cast<std::size_t>(r)] == color;
    comm->group = split.groups.at(color);
    comm->made_by = nullptr;
    const std::lock_guard inner(comm->group->mutex);
    ++comm->group->joined;
  }
  const std::lock_guard lock(comm->group->mutex);
  if (comm->splitting != nullptr) {
    if (comm->splitting->come != comm->group->ranks) return ncclSuccess;
    comm->splitting = nullptr;
  }
  if (comm->group->joined == comm->group->ranks) *state = ncclSuccess;
  return ncclSuccess;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int, ncclComm_t* made, ncclConfig_t*) {
  STANDIN_NCCL_ENTER("ncclCommSplit");
  Group& group = *comm->group;
  *made = make(nullptr, 0);
  (*made)->parent_group = comm->group;
  (*made)->parent_rank = comm->rank;
  const std::lock_guard lock(group.mutex);
  const std::uint64_t place = comm->split_sequence++;
  std::shared_ptr<Split>& split = group.splits[place];
  if (split == nullptr) {
    split = std::make_shared<Split>();
    split->colors.resize(static_cast<std::size_t>(group.ranks));
  }
  split->colors[static_cast<std::size_t>(comm->rank)] = color;
  comm->splitting = (*made)->made_by = split;
  if (++split->come == group.ranks) {
    std::map<int, int> sizes;
    for (const int c : split->colors) ++sizes[c];
    for (const auto& [c, size] : sizes) split->groups[c] = std::make_shared<Group>(size);
    group.splits.erase(place);
  }
  return ncclInProgress;
}

ncclResult_t ncclCommFinalize(ncclComm_t) { return entered<"ncclCommFinalize">(); }
// The communicator goes in any case, so that an error which was only injected leaves nothing behind; but what it still
// holds on to stays, and is seen.
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  const ncclResult_t result = entered<"ncclCommDestroy">();
  unmake(comm);
  return result;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  const ncclResult_t result = entered<"ncclCommAbort">();
  for (const std::uint64_t number : comm->registered) static_cast<void>(standin::release_memory(number));
  unmake(comm);
  return result;
}

ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buffer, std::size_t bytes, void** handle) {
  STANDIN_NCCL_ENTER("ncclCommRegister");
  const std::uint64_t number = standin::hold_memory(buffer, bytes);
  if (number == 0) return ncclInvalidArgument;
  comm->registered.push_back(number);
  *handle = reinterpret_cast<void*>(number);
  return ncclSuccess;
}
ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle) {
  const ncclResult_t result = entered<"ncclCommDeregister">();
  const auto number = reinterpret_cast<std::uint64_t>(handle);
  if (std::erase(comm->registered, number) == 0 || !standin::release_memory(number)) return ncclInvalidArgument;
  return result;
}

ncclResult_t ncclGetVersion(int* version) {
  STANDIN_NCCL_ENTER("ncclGetVersion");
  *version = 22809;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(ncclComm_t comm, int* count) {
  STANDIN_NCCL_ENTER("ncclCommCount");
  *count = comm->group->ranks;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) {
  STANDIN_NCCL_ENTER("ncclCommUserRank");
  *rank = comm->rank;
  return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(ncclComm_t comm, int* device) {
  STANDIN_NCCL_ENTER("ncclCommCuDevice");
  *device = comm->device;
  return ncclSuccess;
}

ncclResult_t ncclAllGather(const void* source, void* destination, std::size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  STANDIN_NCCL_ENTER("ncclAllGather");
  return queue(comm, Kind::gather, source, destination, count, type, stream);
}
ncclResult_t ncclReduceScatter(const void* source, void* destination, std::size_t count, ncclDataType_t type,
                               ncclRedOp_t, ncclComm_t comm, cudaStream_t stream) {
  STANDIN_NCCL_ENTER("ncclReduceScatter");
  return queue(comm, Kind::scatter, source, destination, count, type, stream);
}
ncclResult_t ncclAllReduce(const void* source, void* destination, std::size_t count, ncclDataType_t type, ncclRedOp_t,
                           ncclComm_t comm, cudaStream_t stream) {
  STANDIN_NCCL_ENTER("ncclAllReduce");
  return queue(comm, Kind::reduce, source, destination, count, type, stream);
}

}  // extern "C"
