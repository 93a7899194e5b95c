// The world of one rank.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/engine/communicator.h>
#include <ballast/offload/device.h>

#include <algorithm>

namespace ballast {

namespace {

class SingleCommunicator final : public Communicator {
 public:
  std::string_view name() const override { return "single"; }
  int world_size() const override { return 1; }
  int rank() const override { return 0; }
  void all_reduce_sum(std::span<double>) override {}
  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    BALLAST_CHECK(mine.size() == all.size());
    std::copy(mine.begin(), mine.end(), all.begin());
  }
  void broadcast(std::span<std::byte>, int root) override { BALLAST_CHECK(root == 0); }
  void barrier() override {}
  void all_gather(std::byte*, std::size_t, offload::Stream&) override {}
  void reduce_scatter_sum(const std::byte* data, std::byte* part, std::size_t part_elements, DataType type,
                          offload::Stream& stream) override {
    if (part != data) stream.copy(part, data, part_elements * element_bytes(type));
  }
  void all_reduce_sum(std::byte*, std::size_t, DataType, offload::Stream&) override {}
  std::shared_ptr<Communicator> duplicate() override { return std::make_shared<SingleCommunicator>(); }
  std::shared_ptr<Communicator> split(int) override { return duplicate(); }
  void check() const override {}
  void abort(std::string_view) noexcept override {}
};

}  // namespace

std::shared_ptr<Communicator> make_single_communicator() { return std::make_shared<SingleCommunicator>(); }

}  // namespace ballast
