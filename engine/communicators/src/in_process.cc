// Ranks as threads of one process. All ranks of a communicator share a Group; each place in the order that some rank
// has reached and not all have left is a Meeting in it.
//
// A call has up to three points where ranks wait for each other: all have come (and agree), all have summed, all have
// read. Between them a rank reads its peers' buffers and writes its own only. A rank leaves a meeting, with a result or
// an error, once no peer reads its buffers any more.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/base/error.h>
#include <ballast/communicators/in_process.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "ordered.h"
#include "rank_sum.h"

namespace ballast::communicators {
namespace {

class Group;

struct Meeting {
  explicit Meeting(std::size_t ranks) : calls(ranks), present(ranks), stage(ranks), children(ranks) {}
  bool active = false;
  bool agreed = false;
  std::uint64_t sequence = 0;
  std::vector<Call> calls;  // by rank, of those present
  std::vector<char> present;
  std::vector<int> stage;                        // points that each rank has reached
  int inside = 0;                                // ranks that have come and not left
  int working = 0;                               // ranks that read their peers' buffers right now
  std::vector<std::shared_ptr<Group>> children;  // of duplicate and split, by rank
  std::vector<int> child_ranks;
  std::condition_variable changed;
};

class Group {
 public:
  Group(std::vector<int> world_ranks, std::chrono::nanoseconds timeout)
      : world_ranks_(std::move(world_ranks)), timeout_(timeout), gone_(world_ranks_.size()) {}

  int count() const { return static_cast<int>(world_ranks_.size()); }
  const std::vector<int>& world_ranks() const { return world_ranks_; }
  const FailureLatch& latch() const { return latch_; }

  // A rank's place in a meeting, from its coming until it leaves. A rank that leaves before finish() has failed, and
  // the group with it.
  class Seat {
   public:
    // Returns when all have come and agree.
    Seat(Group& group, const Members& members, const Call& call) : group_(group), members_(members) {
      std::unique_lock lock(group.mutex_);
      group.latch_.throw_if_failed();
      meeting_ = &group.find_or_open(call.signature.sequence);
      const auto rank = static_cast<std::size_t>(members.rank());
      meeting_->calls[rank] = call;
      meeting_->present[rank] = 1;
      ++meeting_->inside;
      try {
        if (std::count(group.gone_.begin(), group.gone_.end(), char{1}) != 0) {
          group.refuse_absent(lock, *meeting_, members);
        }
        group.reach(lock, *meeting_, members, 1);
      } catch (...) {
        group.depart(lock, *meeting_);
        throw;
      }
    }
    ~Seat() {
      if (!finished_) group_.fail(members_.name(members_.rank()) + " failed within a call");
      std::unique_lock lock(group_.mutex_);
      group_.depart(lock, *meeting_);
    }
    Seat(const Seat&) = delete;
    Seat& operator=(const Seat&) = delete;

    Meeting& meeting() const { return *meeting_; }
    void finish() { finished_ = true; }

    // Work that reads peers' buffers, then a point that all must reach.
    template <class Work>
    void work(int point, const Work& do_it) {
      Working working(group_, *meeting_);
      do_it();
      working.end(members_, point);
    }

   private:
    Group& group_;
    const Members& members_;
    Meeting* meeting_ = nullptr;
    bool finished_ = false;
  };

  // One group for each color; rank r of this group gets the one of its own. The last to come makes them.
  std::shared_ptr<Group> child(Meeting& meeting, int rank, int& child_rank) {
    const std::lock_guard lock(mutex_);
    const auto own = static_cast<std::size_t>(rank);
    if (meeting.children[own] == nullptr) make_children(meeting);
    child_rank = meeting.child_ranks[own];
    return std::move(meeting.children[own]);
  }

  void fail(std::string_view text) noexcept {
    std::vector<std::shared_ptr<Group>> children;
    {
      const std::lock_guard lock(mutex_);
      latch_.set(text);
      wake_all();
      for (const auto& weak : children_) {
        if (auto strong = weak.lock()) children.push_back(std::move(strong));
      }
    }
    for (const auto& group : children) group->fail(text);
  }

  // This rank makes no more calls: whoever waits for it, now or later, need not wait for the timeout.
  void set_gone(const Members& members) noexcept {
    std::string text;
    {
      const std::lock_guard lock(mutex_);
      gone_[static_cast<std::size_t>(members.rank())] = 1;
      if (latch_.failed()) return;
      for (const auto& meeting : meetings_) {
        if (meeting->active && meeting->present[static_cast<std::size_t>(members.rank())] == 0) {
          text = left_text(*meeting, members, {members.rank()});
          break;
        }
      }
    }
    if (!text.empty()) fail(text);
  }

 private:
  // While it lives, peers' buffers are read.
  class Working {
   public:
    Working(Group& group, Meeting& meeting) : group_(group), meeting_(meeting) {
      const std::lock_guard lock(group.mutex_);
      group.latch_.throw_if_failed();
      ++meeting.working;
    }
    ~Working() {
      const std::lock_guard lock(group_.mutex_);
      stop();
    }
    Working(const Working&) = delete;
    Working& operator=(const Working&) = delete;
    void end(const Members& members, int point) {
      std::unique_lock lock(group_.mutex_);
      stop();
      group_.reach(lock, meeting_, members, point);
    }

   private:
    void stop() {
      if (!std::exchange(active_, false)) return;
      if (--meeting_.working == 0 && group_.latch_.failed()) meeting_.changed.notify_all();
    }
    Group& group_;
    Meeting& meeting_;
    bool active_ = true;
  };

  Meeting& find_or_open(std::uint64_t sequence) {
    Meeting* unused = nullptr;
    for (const auto& meeting : meetings_) {
      if (meeting->active && meeting->sequence == sequence) return *meeting;
      if (!meeting->active) unused = meeting.get();
    }
    if (unused == nullptr) {
      meetings_.push_back(std::make_unique<Meeting>(world_ranks_.size()));
      unused = meetings_.back().get();
    }
    unused->active = true;
    unused->agreed = false;
    unused->sequence = sequence;
    std::fill(unused->present.begin(), unused->present.end(), char{0});
    std::fill(unused->stage.begin(), unused->stage.end(), 0);
    return *unused;
  }

  // Waits until all ranks have reached `point`. At the first point all are there, and the last to come judges.
  void reach(std::unique_lock<std::mutex>& lock, Meeting& meeting, const Members& members, int point) {
    latch_.throw_if_failed();
    meeting.stage[static_cast<std::size_t>(members.rank())] = point;
    const auto all_there = [&] {
      return std::all_of(meeting.stage.begin(), meeting.stage.end(), [&](int stage) { return stage >= point; });
    };
    if (all_there()) {
      if (point == 1) judge(lock, meeting, members);
      meeting.changed.notify_all();
      return;
    }
    const auto deadline = std::chrono::steady_clock::now() + timeout_;
    // Its own stage stays where it is, so nobody closes the meeting meanwhile.
    if (!meeting.changed.wait_until(lock, deadline, [&] { return latch_.failed() || all_there(); })) {
      std::vector<int> missing;
      for (int r = 0; r < count(); ++r) {
        if (meeting.stage[static_cast<std::size_t>(r)] < point) missing.push_back(r);
      }
      std::string text = overdue(meeting.calls[static_cast<std::size_t>(members.rank())].signature, missing, members,
                                 timeout_, point != 1);
      if (const auto odd = at_odds(meeting, members)) text += ". Besides, " + *odd;
      fail_and_throw(lock, text);
    }
    if (!all_there() || (point == 1 && !meeting.agreed)) latch_.throw_if_failed();
  }

  std::optional<std::string> at_odds(const Meeting& meeting, const Members& members) const {
    std::vector<Signature> signatures;
    std::vector<int> ranks;
    for (int r = 0; r < count(); ++r) {
      if (meeting.present[static_cast<std::size_t>(r)] == 0) continue;
      signatures.push_back(meeting.calls[static_cast<std::size_t>(r)].signature);
      ranks.push_back(r);
    }
    return disagreement(signatures, ranks, members);
  }

  void judge(std::unique_lock<std::mutex>& lock, Meeting& meeting, const Members& members) {
    const Signature& first = meeting.calls.front().signature;
    if (std::all_of(meeting.calls.begin(), meeting.calls.end(), [&](const Call& c) { return c.signature == first; })) {
      meeting.agreed = true;
      return;
    }
    fail_and_throw(lock, *at_odds(meeting, members));
  }

  void refuse_absent(std::unique_lock<std::mutex>& lock, const Meeting& meeting, const Members& members) {
    std::vector<int> absent;
    for (int r = 0; r < count(); ++r) {
      const auto i = static_cast<std::size_t>(r);
      if (gone_[i] != 0 && meeting.present[i] == 0) absent.push_back(r);
    }
    if (absent.empty()) return;
    fail_and_throw(lock, left_text(meeting, members, absent));
  }

  static std::string left_text(const Meeting& meeting, const Members& members, const std::vector<int>& ranks) {
    const auto someone = std::find(meeting.present.begin(), meeting.present.end(), char{1}) - meeting.present.begin();
    return members.names(ranks) + " left (its communicator was destroyed) before " +
           place(meeting.calls[static_cast<std::size_t>(someone)].signature);
  }

  [[noreturn]] void fail_and_throw(std::unique_lock<std::mutex>& lock, const std::string& text) {
    latch_.set(text);  // before anyone else can look at the meeting
    lock.unlock();
    fail(text);
    lock.lock();
    latch_.throw_if_failed();
    BALLAST_CHECK(false);
  }

  // A failed meeting is left only when nobody reads this rank's buffers any more: copies end by themselves. The last to
  // leave closes it; in one that did not fail all have come by then, and to one that did nobody comes.
  void depart(std::unique_lock<std::mutex>& lock, Meeting& meeting) {
    if (latch_.failed()) meeting.changed.wait(lock, [&] { return meeting.working == 0; });
    if (--meeting.inside != 0) return;
    meeting.active = false;
    for (auto& child : meeting.children) child.reset();
  }

  void wake_all() {
    for (const auto& meeting : meetings_) meeting->changed.notify_all();
  }

  void make_children(Meeting& meeting) {
    std::map<int, std::vector<int>> by_color;
    for (int r = 0; r < count(); ++r) by_color[meeting.calls[static_cast<std::size_t>(r)].color].push_back(r);
    meeting.child_ranks.resize(world_ranks_.size());
    std::erase_if(children_, [](const std::weak_ptr<Group>& group) { return group.expired(); });
    for (const auto& [color, ranks] : by_color) {
      std::vector<int> world;
      world.reserve(ranks.size());
      for (int r : ranks) world.push_back(world_ranks_[static_cast<std::size_t>(r)]);
      const auto group = std::make_shared<Group>(std::move(world), timeout_);
      children_.push_back(group);
      for (std::size_t i = 0; i < ranks.size(); ++i) {
        meeting.children[static_cast<std::size_t>(ranks[i])] = group;
        meeting.child_ranks[static_cast<std::size_t>(ranks[i])] = static_cast<int>(i);
      }
    }
  }

  const std::vector<int> world_ranks_;
  const std::chrono::nanoseconds timeout_;
  FailureLatch latch_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Meeting>> meetings_;  // grows to the most that were ever open at once
  std::vector<char> gone_;
  std::vector<std::weak_ptr<Group>> children_;
};

class InProcessState final : public OrderedState {
 public:
  InProcessState(std::shared_ptr<Group> group, int rank, std::chrono::nanoseconds timeout)
      : OrderedState(Members(group->world_ranks(), rank), timeout), group_(std::move(group)) {}

  std::string_view name() const override { return "in-process"; }
  void check() override { group_->latch().throw_if_failed(); }
  void abort(std::string_view reason) noexcept override {
    group_->fail(members().name(members().rank()) + " gave up: " + std::string(reason));
  }

 protected:
  void leave() noexcept override { group_->set_gone(members()); }

  std::shared_ptr<OrderedState> perform_child(const Call& call) override {
    Group::Seat seat(*group_, members(), call);
    int rank = 0;
    std::shared_ptr<Group> group;
    seat.work(2, [&] { group = group_->child(seat.meeting(), members().rank(), rank); });
    seat.finish();
    return std::make_shared<InProcessState>(std::move(group), rank, timeout());
  }

  void perform(const Call& call) override {
    Group::Seat seat(*group_, members(), call);
    const Meeting& meeting = seat.meeting();
    const int own = members().rank();
    const auto ranks = static_cast<std::size_t>(members().count());
    const std::size_t bytes = call.signature.bytes;
    switch (call.signature.kind) {
      case CallKind::barrier:
        break;
      case CallKind::broadcast:
        seat.work(2, [&] {
          const std::byte* source = meeting.calls[static_cast<std::size_t>(call.signature.root)].source;
          if (own != call.signature.root) copy(call.destination, source, bytes);
        });
        break;
      case CallKind::gather_bytes:
        seat.work(2, [&] {
          for (std::size_t r = 0; r < ranks; ++r) copy(call.destination + r * bytes, meeting.calls[r].source, bytes);
        });
        break;
      case CallKind::sum_values:
        sum_values(seat, call);
        break;
      case CallKind::all_gather:
        seat.work(2, [&] { gather_parts(meeting, call, bytes); });
        break;
      case CallKind::reduce_scatter:
        seat.work(2, [&] { sum_part(meeting, call, static_cast<std::size_t>(own) * bytes, bytes, call.destination); });
        break;
      case CallKind::all_reduce:
        all_reduce(seat, call);
        break;
      case CallKind::duplicate:
      case CallKind::split:
        BALLAST_CHECK(false);
    }
    seat.finish();
  }

 private:
  // Lists of peers' addresses, one for each call under way.
  struct Sources {
    std::vector<const std::byte*> addresses;
    std::vector<double> values;
    bool busy = false;
  };
  class Borrowed {
   public:
    explicit Borrowed(InProcessState& state) : state_(state) {
      const std::lock_guard lock(state.sources_mutex_);
      for (auto& each : state.sources_) {
        if (!each->busy) sources_ = each.get();
      }
      if (sources_ == nullptr) {
        sources_ = state.sources_.emplace_back(std::make_unique<Sources>()).get();
        sources_->addresses.resize(static_cast<std::size_t>(state.members().count()));
      }
      sources_->busy = true;
    }
    ~Borrowed() {
      const std::lock_guard lock(state_.sources_mutex_);
      sources_->busy = false;
    }
    Borrowed(const Borrowed&) = delete;
    Borrowed& operator=(const Borrowed&) = delete;
    Sources* operator->() const { return sources_; }

   private:
    InProcessState& state_;
    Sources* sources_ = nullptr;
  };

  static void copy(std::byte* destination, const std::byte* source, std::size_t bytes) {
    if (bytes != 0 && destination != source) std::memcpy(destination, source, bytes);
  }

  void gather_parts(const Meeting& meeting, const Call& call, std::size_t bytes) const {
    for (int i = 1; i < members().count(); ++i) {  // each begins with another peer
      const auto r = static_cast<std::size_t>((members().rank() + i) % members().count());
      copy(call.destination + r * bytes, meeting.calls[r].source + r * bytes, bytes);
    }
  }

  void sum_part(const Meeting& meeting, const Call& call, std::size_t offset, std::size_t bytes,
                std::byte* destination) {
    const Borrowed sources(*this);
    for (std::size_t r = 0; r < meeting.calls.size(); ++r) {
      sources->addresses[r] = bytes == 0 ? nullptr : meeting.calls[r].source + offset;
    }
    sum_in_order(call.signature.type, sources->addresses, destination, bytes / element_bytes(call.signature.type));
  }

  // In place and read by all, so the sums wait beside it until everybody has read.
  void sum_values(Group::Seat& seat, const Call& call) {
    const Meeting& meeting = seat.meeting();
    const Borrowed sources(*this);
    const std::size_t count = call.signature.bytes / sizeof(double);
    if (sources->values.size() < count) sources->values.resize(count);
    seat.work(2, [&] {
      for (std::size_t r = 0; r < meeting.calls.size(); ++r) sources->addresses[r] = meeting.calls[r].source;
      sum_values_in_order(sources->addresses, sources->values.data(), count);
    });
    if (count != 0) std::memcpy(call.destination, sources->values.data(), call.signature.bytes);
  }

  void all_reduce(Group::Seat& seat, const Call& call) {
    const Meeting& meeting = seat.meeting();
    const std::size_t element = element_bytes(call.signature.type);
    const std::size_t elements = call.signature.bytes / element;
    const int ranks = members().count();
    seat.work(2, [&] {
      const PartRange part = part_of(elements, ranks, members().rank());
      const std::size_t offset = part.begin * element;
      sum_part(meeting, call, offset, (part.end - part.begin) * element, call.destination + offset);
    });
    seat.work(3, [&] {
      for (int i = 1; i < ranks; ++i) {
        const int r = (members().rank() + i) % ranks;
        const PartRange part = part_of(elements, ranks, r);
        const std::size_t offset = part.begin * element;
        if (part.end == part.begin) continue;
        copy(call.destination + offset, meeting.calls[static_cast<std::size_t>(r)].source + offset,
             (part.end - part.begin) * element);
      }
    });
  }

  const std::shared_ptr<Group> group_;
  std::mutex sources_mutex_;
  std::vector<std::unique_ptr<Sources>> sources_;
};

}  // namespace
}  // namespace ballast::communicators

namespace ballast {

std::vector<std::shared_ptr<Communicator>> make_in_process_communicators(int world_size,
                                                                         const CommunicatorOptions& options) {
  if (world_size < 1) throw UsageError("a world of " + std::to_string(world_size) + " ranks: there is at least one");
  std::vector<int> world_ranks;
  for (int r = 0; r < world_size; ++r) world_ranks.push_back(r);
  const auto timeout = communicators::effective_timeout(options);
  const auto group = std::make_shared<communicators::Group>(std::move(world_ranks), timeout);
  std::vector<std::shared_ptr<Communicator>> ranks;
  for (int r = 0; r < world_size; ++r) {
    ranks.push_back(
        communicators::make_communicator(std::make_shared<communicators::InProcessState>(group, r, timeout)));
  }
  return ranks;
}

}  // namespace ballast
