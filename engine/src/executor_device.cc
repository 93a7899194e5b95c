// What the executor does differently where the host cannot address the device's memory: states that live there are
// updated by the device's own kernels, in the same order of operations as on the CPU.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/offload/device_kernels.h>

#include <cstring>

#include "executor.h"

namespace ballast::engine {

using schedule::Action;

void Executor::open_device() {
  if (device_.host_addressable()) return;
  kernel_stream_ = device_.make_stream("kernels");
  whole_stream_ = device_.make_stream("chunks");
  device_binding_ = std::unique_ptr<DeviceBinding>(new DeviceBinding{device_, {}});
  if (slab_) {
    device_.register_host_memory(slab_->memory());
    device_binding_->pinned = slab_->memory();
  }
  // May come on a thread that holds the mutex: left for the engine thread, which finds it before any completion that
  // comes after it.
  device_.set_failure_handler([this](std::exception_ptr failure) {
    {
      const std::lock_guard<std::mutex> lock(completions_mutex_);
      device_failure_ = std::move(failure);
    }
    wake_.notify();
  });
}

// Collectives run over the one slab of device memory: each of their transports is told of it once.
void Executor::register_with_communicators() {
  bool told = plan_.device_bytes == 0 || !log_;
  for (const Channels& channels : channels_) {
    for (Communicator* ranks : {channels.gather.get(), channels.reduce.get(), channels.replicas.get()}) {
      std::string reason;
      if (ranks == nullptr || plan_.device_bytes == 0) continue;
      if (ranks->register_buffer({device_slab_, plan_.device_bytes}, &reason) || told) continue;
      told = true;
      log_(LogLevel::warning, "device memory is not registered with " + std::string(ranks->name()) + " (" + reason +
                                  "); collectives work, slower");
    }
  }
}

void Executor::unregister_from_communicators() {
  for (const Channels& channels : channels_) {
    for (Communicator* ranks : {channels.gather.get(), channels.reduce.get(), channels.replicas.get()}) {
      if (ranks != nullptr) ranks->unregister_buffer({device_slab_, plan_.device_bytes});
    }
  }
}

void Executor::close_device() {
  if (device_.host_addressable()) return;
  kernel_stream_.reset();
  whole_stream_.reset();
  device_binding_.reset();
}

Executor::DeviceBinding::~DeviceBinding() {
  if (!pinned.empty()) device.unregister_host_memory(pinned);
  device.set_failure_handler({});
}

void Executor::copy_from_device(void* destination, const void* source, std::uint64_t bytes) {
  if (device_.host_addressable()) {
    std::memcpy(destination, source, bytes);
    return;
  }
  whole_stream_->copy(destination, source, bytes);
  whole_stream_->synchronize();
}

void Executor::copy_to_device(void* destination, const void* source, std::uint64_t bytes) {
  copy_from_device(destination, source, bytes);
}

void Executor::update_states(const Action& action, const offload::ChunkArrays& arrays) {
  const ChunkPlacement& place = plan_.placement[action.chunk];
  const bool parameter = place.parameters == Tier::device;
  const bool optimizer = place.optimizer == Tier::device;
  const bool gradient = place.gradients == Tier::device;
  if (device_.host_addressable() || !(parameter || optimizer || gradient)) {
    offload::update_chunk(*pool_, arrays, segments_);
    return;
  }
  if (parameter && optimizer && gradient) {
    device_.kernels()->update(*kernel_stream_, arrays, segments_);
    kernel_stream_->synchronize();
    return;
  }
  // States on both sides: the CPU works on copies of what lies on the device.
  const ChunkLayout& chunk = plan_.layout.chunks[action.chunk];
  const std::uint64_t gradient_bytes = chunk.elements * gradient_bytes_;
  staged_states_.resize(chunk.parameter_bytes + chunk.optimizer_bytes() + gradient_bytes);
  std::byte* const parameters = staged_states_.data();
  std::byte* const states = parameters + chunk.parameter_bytes;
  std::byte* const gradients = states + chunk.optimizer_bytes();
  offload::ChunkArrays staged = arrays;
  std::byte* const device_states = arrays.exp_avg - chunk.master_bytes;
  if (parameter) {
    kernel_stream_->copy(parameters, arrays.parameter, chunk.parameter_bytes);
    staged.parameter = parameters;
  }
  if (optimizer) {
    kernel_stream_->copy(states, device_states, chunk.optimizer_bytes());
    staged.master = chunk.master_bytes > 0 ? states : nullptr;
    staged.exp_avg = states + chunk.master_bytes;
    staged.exp_avg_sq = states + chunk.master_bytes + chunk.moment_bytes;
  }
  if (gradient) {
    kernel_stream_->copy(gradients, arrays.gradient, gradient_bytes);
    staged.gradient = gradients;
  }
  kernel_stream_->synchronize();
  offload::update_chunk(*pool_, staged, segments_);
  if (parameter) kernel_stream_->copy(arrays.parameter, parameters, chunk.parameter_bytes);
  if (optimizer) kernel_stream_->copy(device_states, states, chunk.optimizer_bytes());
  kernel_stream_->synchronize();
}

// Gradients that are stored on the device, where their contribution lies too.
void Executor::add_to_store(const Action& action, const std::byte* contribution) {
  const std::uint64_t elements = plan_.layout.chunks[action.chunk].elements;
  std::byte* const store = gradient_store(action.chunk);
  if (device_.host_addressable()) {
    offload::accumulate_chunk(*pool_, gradient_type_, store, contribution, elements, action.first);
    return;
  }
  device_.kernels()->accumulate(*kernel_stream_, gradient_type_, store, contribution, elements, action.first);
  kernel_stream_->synchronize();
}

void Executor::square_sums(std::uint32_t chunk, const std::byte* total, bool on_device) {
  const ChunkLayout& layout = plan_.layout.chunks[chunk];
  double* const sums = block_sums_.data() + layout.first_block;
  if (device_.host_addressable() || !on_device) {
    offload::sum_squares_chunk(*pool_, gradient_type_, total, layout.elements, sums);
    return;
  }
  device_.kernels()->sum_squares(*kernel_stream_, gradient_type_, total, layout.elements, sums);
  kernel_stream_->synchronize();
}

}  // namespace ballast::engine
