// The world of one rank.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/engine/communicator.h>

namespace ballast {

namespace {

class SingleCommunicator final : public Communicator {
 public:
  std::string_view name() const override { return "single"; }
  int world_size() const override { return 1; }
  int rank() const override { return 0; }
  void all_reduce_sum(std::span<double>) override {}
  void barrier() override {}
};

}  // namespace

std::shared_ptr<Communicator> make_single_communicator() { return std::make_shared<SingleCommunicator>(); }

}  // namespace ballast
