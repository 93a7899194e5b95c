// Collective calls over MPI messages.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/base/error.h>
#include <ballast/communicators/mpi.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <utility>

#include "mpi_exchange.h"
#include "mpi_result.h"
#include "mpi_world.h"
#include "ordered.h"
#include "rank_sum.h"

namespace ballast::communicators {
namespace {

constexpr std::size_t kDirectPieceBytes = std::size_t{4} << 20;     // from buffer to buffer
constexpr std::size_t kSumMemoryBytes = std::size_t{16} << 20;      // what pieces to be summed take at most,
constexpr std::size_t kLeastSumPieceBytes = std::size_t{16} << 10;  // unless this says more
constexpr std::size_t kMostSumPieceBytes = std::size_t{1} << 20;
constexpr std::size_t kAbortTextBytes = 1000;
constexpr std::chrono::milliseconds kAbortSendTime{200};

// What a rank says last: why, and whether anything that waits for all can still end.
enum class Ending : char { gave_up, rank_missing };
struct Farewell {
  Ending ending = Ending::gave_up;
  std::array<char, kAbortTextBytes> text;
};
static_assert(sizeof(Farewell) == kAbortTextBytes + 1);

struct Buffer {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

Buffer piece_of(Buffer whole, std::size_t piece, std::size_t piece_bytes) {
  const std::size_t begin = std::min(whole.bytes, piece * piece_bytes);
  return {whole.data == nullptr ? nullptr : whole.data + begin, std::min(piece_bytes, whole.bytes - begin)};
}

class MpiState final : public OrderedState {
 public:
  MpiState(std::shared_ptr<MpiWorld> world, std::shared_ptr<MpiState> parent, std::uint32_t context, Members ranks,
           std::chrono::nanoseconds timeout)
      : OrderedState(std::move(ranks), timeout),
        world_(std::move(world)),
        parent_(std::move(parent)),
        context_(context),
        sum_piece_bytes_(std::clamp(kSumMemoryBytes / kRequestSets / at(members().count()) / 4096 * 4096,
                                    kLeastSumPieceBytes, kMostSumPieceBytes)) {}

  std::string_view name() const override { return "mpi"; }

  void check() override {
    hear();
    latch_.throw_if_failed();
  }

  void abort(std::string_view reason) noexcept override {
    const std::string text = members().name(own()) + " gave up: " + std::string(reason);
    if (latch_.failed()) return;
    fail(text);
    tell(text, Ending::gave_up);
  }

 protected:
  void perform(const Call& call) override {
    with_exchange(call, [&](Exchange& exchange) { carry_out(exchange, call); });
  }

  std::shared_ptr<OrderedState> perform_child(const Call& call) override {
    const std::unique_lock one_at_a_time(world_->context_mutex(), timeout());
    if (!one_at_a_time.owns_lock()) {
      abort(
          "another of its threads makes a communicator of the same MPI world and does not end; they are made in one "
          "order on every rank");
      latch_.throw_if_failed();
    }
    std::uint32_t context = 0;
    std::vector<int> ranks;
    int rank = 0;
    with_exchange(call, [&](Exchange& exchange) {
      Workspace& workspace = exchange.workspace();
      workspace.mine.color = call.color;
      workspace.mine.next_context = world_->next_context();
      greet(exchange, call, 0);
      for (int r = 0; r < members().count(); ++r) {
        const Greeting& greeting = r == own() ? workspace.mine : workspace.theirs[at(r)];
        context = std::max(context, greeting.next_context);
        if (greeting.color != call.color) continue;
        if (r == own()) rank = static_cast<int>(ranks.size());
        ranks.push_back(members().world_rank(r));
      }
    });
    world_->take_context(context);
    const auto parent = std::static_pointer_cast<MpiState>(shared_from_this());
    auto child = std::make_shared<MpiState>(world_, parent, context, Members(std::move(ranks), rank), timeout());
    const std::lock_guard lock(children_mutex_);
    std::erase_if(children_, [](const std::weak_ptr<MpiState>& each) { return each.expired(); });
    children_.push_back(child);
    return child;
  }

 private:
  static std::size_t at(int rank) { return static_cast<std::size_t>(rank); }
  int own() const { return members().rank(); }
  int tag(const Call& call, MessageKind kind) const { return world_->tag(context_, call.signature.sequence, kind); }

  // A failure that began here is told to all; one that was heard, or that all see by themselves, is not.
  template <class Work>
  void with_exchange(const Call& call, const Work& work) {
    latch_.throw_if_failed();
    try {
      CallWatch watch(*this, call);
      Exchange exchange(*world_, workspaces_, members(), timeout(), watch);
      watch.watch_greetings(exchange.workspace());
      work(exchange);
    } catch (const CommunicationError& error) {
      if (!latch_.failed()) {
        const std::string text = place(call.signature) + " of " + members().name(own()) + ": " + error.what();
        world_->set_broken();  // MPI itself failed
        fail(text);
        tell(text, Ending::rank_missing);
      }
      latch_.throw_if_failed();
    }
  }

  // Kept by each call while it waits.
  class CallWatch final : public WaitWatch {
   public:
    CallWatch(MpiState& state, const Call& call) : state_(state), call_(call) {}
    void watch_greetings(Workspace& workspace) {
      workspace_ = &workspace;
      for (Greeting& greeting : workspace.theirs) greeting.signature.reserved = kNotCome;
    }

    void look() override {
      state_.hear();
      state_.latch_.throw_if_failed();
    }
    void long_wait() override { state_.world_->tell_waiting(); }
    void overdue_ranks(const std::vector<int>& all_late) override {
      // Those who wait for others themselves, here or elsewhere, are not to blame, unless all do.
      state_.world_->hear_waiting();
      std::vector<int> late;
      for (const int r : all_late) {
        if (!state_.world_->waits(state_.members().world_rank(r), state_.timeout())) late.push_back(r);
      }
      if (late.empty()) late = all_late;
      std::vector<Signature> signatures;
      std::vector<int> ranks;
      for (int r = 0; r < state_.members().count(); ++r) {
        const bool here = r == state_.own();
        const Signature& signature = here ? call_.signature : workspace_->theirs[at(r)].signature;
        if (signature.reserved == kNotCome) continue;
        signatures.push_back(signature);
        ranks.push_back(r);
      }
      const bool all_came = static_cast<int>(ranks.size()) == state_.members().count();
      std::string text = overdue(call_.signature, late, state_.members(), state_.timeout(), all_came);
      if (const auto odd = disagreement(signatures, ranks, state_.members())) text += ". Besides, " + *odd;
      state_.world_->set_broken();
      state_.fail(text);
      state_.tell(text, Ending::rank_missing);
      state_.latch_.throw_if_failed();
    }

   private:
    static constexpr std::uint16_t kNotCome = 0xFFFF;
    MpiState& state_;
    const Call& call_;
    Workspace* workspace_ = nullptr;
  };

  // Takes what other ranks have said about their end, here and above.
  void hear() {
    for (MpiState* state = this; state != nullptr; state = state->parent_.get()) {
      if (state->latch_.failed()) continue;
      int found = 0;
      MPI_Message message = MPI_MESSAGE_NULL;
      MPI_Status status;
      check_mpi(MPI_Improbe(MPI_ANY_SOURCE, world_->tag(state->context_, 0, MessageKind::abort), world_->comm(), &found,
                            &message, &status),
                "MPI_Improbe");
      if (found == 0) continue;
      Farewell farewell;
      int bytes = 0;
      check_mpi(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
      BALLAST_CHECK(bytes >= 1 && static_cast<std::size_t>(bytes) <= sizeof farewell);
      check_mpi(MPI_Mrecv(&farewell, bytes, MPI_BYTE, &message, &status), "MPI_Mrecv");  // it has arrived
      if (farewell.ending == Ending::rank_missing) world_->set_broken();
      state->fail(std::string_view(farewell.text.data(), static_cast<std::size_t>(bytes) - 1));
    }
  }

  void fail(std::string_view text) noexcept {
    world_->set_failed();
    latch_.set(text);
    std::vector<std::shared_ptr<MpiState>> children;
    {
      const std::lock_guard lock(children_mutex_);
      for (const auto& weak : children_) {
        if (auto child = weak.lock()) children.push_back(std::move(child));
      }
    }
    for (const auto& child : children) child->fail(text);
  }

  // Says so to every other rank, as far as MPI takes the messages; never waits long.
  void tell(std::string_view text, Ending ending) noexcept {
    struct Telling {
      Farewell farewell;
      std::vector<MPI_Request> requests;
    };
    auto telling = std::make_unique<Telling>();
    const std::size_t bytes = std::min(text.size(), telling->farewell.text.size());
    std::copy_n(text.begin(), bytes, telling->farewell.text.begin());
    telling->farewell.ending = ending;
    for (int r = 0; r < members().count(); ++r) {
      if (r == own()) continue;
      MPI_Request request = MPI_REQUEST_NULL;
      if (MPI_Isend(&telling->farewell, static_cast<int>(bytes) + 1, MPI_BYTE, members().world_rank(r),
                    world_->tag(context_, 0, MessageKind::abort), world_->comm(), &request) == MPI_SUCCESS) {
        telling->requests.push_back(request);
      }
    }
    Backoff backoff;
    const auto deadline = std::chrono::steady_clock::now() + kAbortSendTime;
    for (;;) {
      int done = 0;
      const int count = static_cast<int>(telling->requests.size());
      if (MPI_Testall(count, telling->requests.data(), &done, MPI_STATUSES_IGNORE) == MPI_SUCCESS && done != 0) return;
      if (std::chrono::steady_clock::now() > deadline) break;
      backoff.pause();
    }
    world_->set_broken();
    static_cast<void>(telling.release());  // MPI may still read it
  }

  // --- what moves -------------------------------------------------------------------------------------------------

  // Tells everybody what this rank does here and hears the same of them; returns when all agree. `inline_bytes` of
  // workspace().mine.data go along.
  void greet(Exchange& exchange, const Call& call, std::size_t inline_bytes) {
    Workspace& workspace = exchange.workspace();
    workspace.mine.signature = call.signature;
    const int greeting = tag(call, MessageKind::greeting);
    for_peers([&](int r) { exchange.receive(0, r, &workspace.theirs[at(r)], sizeof(Greeting), greeting); });
    for_peers([&](int r) { exchange.send(0, r, &workspace.mine, kGreetingHeadBytes + inline_bytes, greeting); });
    exchange.wait(0);
    // Those who greeted may have given up on this rank since.
    hear();
    latch_.throw_if_failed();
    bool agreed = true;
    for_peers([&](int r) { agreed = agreed && workspace.theirs[at(r)].signature == call.signature; });
    if (agreed) return;
    std::vector<Signature> signatures(at(members().count()));
    std::vector<int> ranks(at(members().count()));
    for (int r = 0; r < members().count(); ++r) {
      ranks[at(r)] = r;
      signatures[at(r)] = r == own() ? call.signature : workspace.theirs[at(r)].signature;
    }
    fail(*disagreement(signatures, ranks, members()));
    latch_.throw_if_failed();
  }

  // Every rank begins with another peer.
  template <class Each>
  void for_peers(const Each& each) const {
    const int count = members().count();
    for (int i = 1; i < count; ++i) each((own() + i) % count);
  }

  // Moves outgoing(r) to each rank r and incoming(set, r, piece) from it, a piece after the other, two at a time;
  // `arrived` is called for each piece in order, when it is there and what was sent of it is gone.
  template <class Outgoing, class Incoming, class Arrived>
  void move(Exchange& exchange, int message_tag, std::size_t piece_bytes, const Outgoing& outgoing,
            const Incoming& incoming, std::size_t most_bytes, const Arrived& arrived) {
    const std::size_t pieces = (most_bytes + piece_bytes - 1) / piece_bytes;
    for (std::size_t piece = 0; piece < pieces + kRequestSets - 1; ++piece) {
      if (piece < pieces) {
        const int set = static_cast<int>(piece % kRequestSets);
        for_peers([&](int r) {
          const Buffer in = incoming(r, piece);
          if (in.bytes != 0) exchange.receive(set, r, in.data, in.bytes, message_tag);
        });
        for_peers([&](int r) {
          const Buffer out = piece_of(outgoing(r), piece, piece_bytes);
          if (out.bytes != 0) exchange.send(set, r, out.data, out.bytes, message_tag);
        });
      }
      if (piece + 1 < kRequestSets) continue;
      const std::size_t ready = piece + 1 - kRequestSets;
      if (ready >= pieces) continue;
      exchange.wait(static_cast<int>(ready % kRequestSets));
      arrived(ready);
    }
  }

  // From buffer to buffer.
  template <class Outgoing, class Incoming>
  void move_direct(Exchange& exchange, int message_tag, const Outgoing& outgoing, const Incoming& incoming,
                   std::size_t most_bytes) {
    move(
        exchange, message_tag, kDirectPieceBytes, outgoing,
        [&](int r, std::size_t piece) { return piece_of(incoming(r), piece, kDirectPieceBytes); }, most_bytes,
        [](std::size_t) {});
  }

  // Sends outgoing(r) to each r; takes from each as much as `mine` holds; sum(sources, offset, bytes) gets every rank's
  // piece in rank order, this rank's own out of `mine`.
  template <class Outgoing, class Sum>
  void move_and_sum(Exchange& exchange, int message_tag, const Outgoing& outgoing, Buffer mine, std::size_t most_bytes,
                    const Sum& sum) {
    Workspace& workspace = exchange.workspace();
    const std::size_t ranks = at(members().count());
    if (workspace.pieces == nullptr) {
      workspace.pieces = std::make_unique_for_overwrite<std::byte[]>(kRequestSets * ranks * sum_piece_bytes_);
    }
    const auto place_of = [&](int r, std::size_t piece) {
      return workspace.pieces.get() + (piece % kRequestSets * ranks + at(r)) * sum_piece_bytes_;
    };
    move(
        exchange, message_tag, sum_piece_bytes_, outgoing,
        [&](int r, std::size_t piece) {
          return Buffer{place_of(r, piece), piece_of(mine, piece, sum_piece_bytes_).bytes};
        },
        most_bytes,
        [&](std::size_t piece) {
          const Buffer here = piece_of(mine, piece, sum_piece_bytes_);
          if (here.bytes == 0) return;
          for (int r = 0; r < members().count(); ++r) workspace.sources[at(r)] = place_of(r, piece);
          workspace.sources[at(own())] = here.data;
          sum(workspace.sources, piece * sum_piece_bytes_, here.bytes);
        });
  }

  void carry_out(Exchange& exchange, const Call& call) {
    Workspace& workspace = exchange.workspace();
    const Signature& s = call.signature;
    const bool small = s.bytes <= Greeting::kInlineBytes;
    const bool rides = small && (s.kind == CallKind::sum_values || s.kind == CallKind::gather_bytes ||
                                 (s.kind == CallKind::broadcast && s.root == own()));
    if (rides && s.bytes != 0) std::memcpy(workspace.mine.data, call.source, s.bytes);
    greet(exchange, call, rides ? s.bytes : 0);
    if (s.bytes == 0) return;
    switch (s.kind) {
      case CallKind::barrier:
        return;
      case CallKind::broadcast:
        broadcast(exchange, call, small);
        return;
      case CallKind::gather_bytes:
        gather_bytes(exchange, call, small);
        return;
      case CallKind::sum_values:
        sum_values(exchange, call, small);
        return;
      case CallKind::all_gather: {
        const auto part = [&](int r) { return Buffer{call.destination + at(r) * s.bytes, s.bytes}; };
        move_direct(
            exchange, tag(call, MessageKind::data), [&](int) { return part(own()); }, part, s.bytes);
        return;
      }
      case CallKind::reduce_scatter:
        reduce_scatter(exchange, call);
        return;
      case CallKind::all_reduce:
        all_reduce(exchange, call);
        return;
      case CallKind::duplicate:
      case CallKind::split:
        BALLAST_CHECK(false);
    }
  }

  // From the root to each: what is broadcast is small or rare.
  void broadcast(Exchange& exchange, const Call& call, bool small) {
    const Signature& s = call.signature;
    if (small) {
      if (s.root != own()) std::memcpy(call.destination, exchange.workspace().theirs[at(s.root)].data, s.bytes);
      return;
    }
    const Buffer all{call.destination, s.bytes};
    move_direct(
        exchange, tag(call, MessageKind::data), [&](int) { return s.root == own() ? all : Buffer{}; },
        [&](int r) { return r == s.root ? all : Buffer{}; }, s.bytes);
  }

  void gather_bytes(Exchange& exchange, const Call& call, bool small) {
    const std::size_t bytes = call.signature.bytes;
    const auto part = [&](int r) { return Buffer{call.destination + at(r) * bytes, bytes}; };
    if (call.source != part(own()).data) std::memmove(part(own()).data, call.source, bytes);
    if (small) {
      for_peers([&](int r) { std::memcpy(part(r).data, exchange.workspace().theirs[at(r)].data, bytes); });
      return;
    }
    move_direct(
        exchange, tag(call, MessageKind::data), [&](int) { return part(own()); }, part, bytes);
  }

  void sum_values(Exchange& exchange, const Call& call, bool small) {
    Workspace& workspace = exchange.workspace();
    const std::size_t bytes = call.signature.bytes;
    if (small) {
      for (int r = 0; r < members().count(); ++r) {
        workspace.sources[at(r)] = r == own() ? workspace.mine.data : workspace.theirs[at(r)].data;
      }
      sum_values_in_order(workspace.sources, reinterpret_cast<double*>(call.destination), bytes / sizeof(double));
      return;
    }
    const Buffer mine{call.destination, bytes};
    std::array<double, 512> sum;
    move_and_sum(
        exchange, tag(call, MessageKind::data), [&](int) { return mine; }, mine, bytes,
        [&](std::vector<const std::byte*>& sources, std::size_t offset, std::size_t piece_bytes) {
          // In place: through a block beside it.
          for (std::size_t done = 0; done < piece_bytes; done += sizeof sum) {
            const std::size_t block = std::min(sizeof sum, piece_bytes - done);
            sum_values_in_order(sources, sum.data(), block / sizeof(double));
            std::memcpy(call.destination + offset + done, sum.data(), block);
            for (const std::byte*& source : sources) source += block;
          }
        });
  }

  void reduce_scatter(Exchange& exchange, const Call& call) {
    const Signature& s = call.signature;
    auto* const data = const_cast<std::byte*>(call.source);  // sent from, never written
    const auto part = [&](int r) { return Buffer{data + at(r) * s.bytes, s.bytes}; };
    move_and_sum(exchange, tag(call, MessageKind::data), part, part(own()), s.bytes,
                 [&](const std::vector<const std::byte*>& sources, std::size_t offset, std::size_t bytes) {
                   sum_in_order(s.type, sources, call.destination + offset, bytes / element_bytes(s.type));
                 });
  }

  void all_reduce(Exchange& exchange, const Call& call) {
    const Signature& s = call.signature;
    const std::size_t element = element_bytes(s.type);
    const auto part = [&](int r) {
      const PartRange range = part_of(s.bytes / element, members().count(), r);
      return Buffer{call.destination + range.begin * element, (range.end - range.begin) * element};
    };
    const std::size_t most = part(0).bytes;
    const Buffer mine = part(own());
    move_and_sum(exchange, tag(call, MessageKind::data), part, mine, most,
                 [&](const std::vector<const std::byte*>& sources, std::size_t offset, std::size_t bytes) {
                   sum_in_order(s.type, sources, mine.data + offset, bytes / element);
                 });
    move_direct(
        exchange, tag(call, MessageKind::second_data), [&](int) { return mine; }, part, most);
  }

  const std::shared_ptr<MpiWorld> world_;
  const std::shared_ptr<MpiState> parent_;
  const std::uint32_t context_;
  const std::size_t sum_piece_bytes_;
  WorkspacePool workspaces_;
  FailureLatch latch_;
  std::mutex children_mutex_;
  std::vector<std::weak_ptr<MpiState>> children_;
};

}  // namespace
}  // namespace ballast::communicators

namespace ballast {

std::shared_ptr<Communicator> make_mpi_communicator(const MpiOptions& options) {
  using namespace communicators;
  const auto timeout = effective_timeout(options.common);
  auto world = MpiWorld::open(options, timeout);
  std::vector<int> ranks;
  for (int r = 0; r < world->size(); ++r) ranks.push_back(r);
  Members members(std::move(ranks), world->rank());
  return make_communicator(
      std::make_shared<MpiState>(std::move(world), nullptr, std::uint32_t{0}, std::move(members), timeout));
}

std::function<std::shared_ptr<Communicator>(const CommunicatorOptions&)> mpi_communicator_factory() {
  return [](const CommunicatorOptions& options) { return make_mpi_communicator({nullptr, true, options}); };
}

}  // namespace ballast
