// The world of one rank.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/engine/communicator.h>
#include <ballast/offload/device.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

namespace ballast {

namespace {

class SingleCommunicator final : public Communicator {
 public:
  // What has given up a communicator has given up those made from it.
  struct Latch {
    std::mutex mutex;
    bool failed = false;
    std::string text;
    std::vector<std::weak_ptr<Latch>> children;
  };

  std::string_view name() const override { return "single"; }
  int world_size() const override { return 1; }
  int rank() const override { return 0; }
  void all_reduce_sum(std::span<double>) override { check(); }
  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    check();
    if (mine.size() != all.size()) {
      throw UsageError("all_gather of " + std::to_string(mine.size()) +
                       " bytes over one rank wants room for them, not " + std::to_string(all.size()) + " bytes");
    }
    std::copy(mine.begin(), mine.end(), all.begin());
  }
  void broadcast(std::span<std::byte>, int root) override {
    check();
    if (root != 0) throw UsageError("broadcast from rank " + std::to_string(root) + " of 1");
  }
  void barrier() override { check(); }
  void all_gather(std::byte*, std::size_t, offload::Stream&) override { check(); }
  void reduce_scatter_sum(const std::byte* data, std::byte* part, std::size_t part_elements, DataType type,
                          offload::Stream& stream) override {
    check();
    if (part != data) stream.copy(part, data, part_elements * element_bytes(type));
  }
  void all_reduce_sum(std::byte*, std::size_t, DataType, offload::Stream&) override { check(); }
  std::shared_ptr<Communicator> duplicate() override {
    check();
    auto child = std::make_shared<SingleCommunicator>();
    const std::lock_guard lock(latch_->mutex);
    std::erase_if(latch_->children, [](const std::weak_ptr<Latch>& each) { return each.expired(); });
    latch_->children.push_back(child->latch_);
    return child;
  }
  std::shared_ptr<Communicator> split(int) override { return duplicate(); }
  void check() const override {
    const std::lock_guard lock(latch_->mutex);
    if (latch_->failed) throw CommunicationError(latch_->text);
  }
  void abort(std::string_view reason) noexcept override { fail(*latch_, "rank 0 gave up: " + std::string(reason)); }

 private:
  static void fail(Latch& latch, const std::string& text) {
    const std::lock_guard lock(latch.mutex);
    if (!latch.failed) latch.text = text;
    latch.failed = true;
    for (const auto& child : latch.children) {
      if (const auto alive = child.lock()) fail(*alive, text);
    }
  }

  const std::shared_ptr<Latch> latch_ = std::make_shared<Latch>();
};

}  // namespace

std::shared_ptr<Communicator> make_single_communicator() { return std::make_shared<SingleCommunicator>(); }

}  // namespace ballast
