// FaultyStorage: wraps a Storage and spoils what comes back, by seed: late and reordered completions, failures, short
// counts, flipped bits.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/base/random.h>
#include <ballast/io/storage.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace ballast::io::testing {

// Rates are per thousand operations; each operation suffers one of them at most.
struct Faults {
  std::uint64_t seed = 1;
  std::uint32_t delay_polls_max = 0;     // each completion is held back for 0 to this many polls
  std::uint32_t errors_per_mille = 0;    // ends with one of error_numbers
  std::vector<int> error_numbers = {5};  // EIO
  std::uint32_t shorts_per_mille = 0;    // ends with EIO and transferred_bytes below bytes
  std::uint32_t flips_per_mille = 0;     // a read succeeds, with one bit of its memory flipped
};

// One thread at a time, as any Storage. `wake`, the event of the wrapped storage, is notified while completions are
// held.
class FaultyStorage final : public Storage {
 public:
  FaultyStorage(std::unique_ptr<Storage> inner, Faults faults, base::WakeEvent* wake);
  ~FaultyStorage() override;

  std::uint32_t add_file(int descriptor) override { return inner_->add_file(descriptor); }
  bool register_memory(std::span<std::byte> memory, std::string* reason) override {
    return inner_->register_memory(memory, reason);
  }
  void submit(std::span<Operation* const> operations) override;
  std::size_t poll(std::span<Operation*> finished, bool wait) override;
  void cancel(Operation& operation) override;
  int flush(std::uint32_t file) override { return inner_->flush(file); }
  std::size_t outstanding() const override { return inner_->outstanding() + held_.size(); }
  std::uint64_t alignment_bytes() const override { return inner_->alignment_bytes(); }
  std::string_view name() const override { return "faulty"; }
  const StorageCounters& counters() const override { return inner_->counters(); }

  Storage& inner() { return *inner_; }
  // How many operations were spoilt so far, of each kind: for tests that must see that something happened.
  std::uint64_t errors() const { return errors_; }
  std::uint64_t shorts() const { return shorts_; }
  std::uint64_t flips() const { return flips_; }

 private:
  struct Held {
    Operation* operation;
    std::uint64_t release_poll;
  };
  void spoil(Operation& operation);

  std::unique_ptr<Storage> inner_;
  Faults faults_;
  base::WakeEvent* wake_;
  base::Random random_;
  std::vector<Held> held_;
  std::uint64_t polls_ = 0;
  std::uint64_t errors_ = 0;
  std::uint64_t shorts_ = 0;
  std::uint64_t flips_ = 0;
};

}  // namespace ballast::io::testing
