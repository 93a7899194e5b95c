// EngineImplementation: what stands behind the public classes. Registers units, keeps the trainer's side of the
// contract (steps, passes, leases), records and follows traces, and tells the scheduler what is expected and what
// happens. The executor does the rest. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/engine/communicator.h>
#include <ballast/engine/engine.h>
#include <ballast/offload/device.h>
#include <ballast/offload/machine_share.h>

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "durable/checkpoint_save.h"
#include "durable/manifest.h"
#include "durable/step_committer.h"
#include "durable/stored_state.h"
#include "executor.h"
#include "loss_scaler.h"
#include "plan.h"
#include "trace.h"

namespace ballast {

class EngineImplementation {
 public:
  EngineImplementation(const Config& config, EngineEnvironment environment);
  ~EngineImplementation();

  // The public class by the same name says what each does.
  UnitId add_unit(std::string name, std::vector<ParameterSpec> parameters, UnitOptions options);
  ParameterId parameter(UnitId unit, std::string_view name) const;
  void expect_order(std::vector<ExpectedAccess> accesses, int micro_batches);
  void commit(const CommitOptions& options);
  void save_checkpoint(const std::string& path, std::size_t keep);
  void finish_checkpoint();
  const std::optional<ResumedStep>& resumed() const { return resumed_; }
  std::optional<std::uint64_t> committed_step() const;
  void initialize(const Engine::Fill& fill);
  Step begin_step(StepOptions options);
  PassScope begin_pass(PassOptions options, bool within_step);
  void end_pass(std::uint64_t serial);
  ParameterLease acquire(UnitId unit, Stream stream);
  GradientLease gradients(UnitId unit, Stream stream);
  void settle();
  void settle_updates();
  void read(ParameterId id, std::int64_t first_element, std::span<float> values);
  void read_moments(ParameterId id, std::int64_t first_element, std::span<float> exp_avg, std::span<float> exp_avg_sq);
  std::uint64_t step_count(ParameterId id) const;
  Stream stream() const;
  Stream make_stream(std::string_view name);
  Stream adopt_stream(void* native_handle, std::string_view name);
  std::uint64_t layout_generation() const { return layout_generation_; }
  Report report();
  Timeline timeline();
  void write_trace(const std::string& path);
  const Config& config() const { return config_; }

  Tensor parameter_tensor(std::uint64_t lease, ParameterId id);
  Tensor gradient_tensor(std::uint64_t lease, ParameterId id);
  void wait_parameters(std::uint64_t lease);
  void release_parameters(std::uint64_t lease, Stream* stream);
  void mark_absent(std::uint64_t lease, ParameterId id);
  void commit_gradients(std::uint64_t lease, Stream stream, bool partial);
  void discard_gradients(std::uint64_t lease);

  double loss_scale() const { return loss_scaler_.scale(); }
  GradientNorm finish_backward(const AddOthers& add_others);
  void update(std::span<const std::byte> user_bytes);
  void discard();
  void abandon_step() noexcept;

 private:
  using Lock = engine::Executor::Lock;

  struct Lease {
    bool alive = false;
    bool gradient = false;
    bool committed = false;
    bool partial = false;
    bool last = false;          // of the step
    bool gated = false;         // its stream has still to let it through
    bool gate_watched = false;  // another stream waits for that
    bool ended = false;         // to be freed with that
    std::uint32_t generation = 0;
    std::uint32_t index = 0;
    std::uint32_t unit = 0;
    schedule::Index entry = schedule::kNone;
    std::uint32_t opening = 0;  // the recorder's
    std::uint64_t pass = 0;
    offload::Stream* stream = nullptr;
    std::vector<std::uint8_t> absent;  // per parameter, where any is
  };
  struct UnitState {
    std::map<std::string, std::uint32_t, std::less<>> names;  // of its parameters
    bool trainable = false;
    bool partial_open = false;               // partial commits wait for their last
    std::uint64_t last_commit_pass = 0;      // the pass that has had its last one
    bool updated_eagerly = false;            // in the running step
    bool opened = false;                     // its parameters, since the last decision
    bool decided = false;                    // the last decision updates it
    bool update_queued = false;              // eager: an open lease has queued its update, which holds or wants slots
    std::vector<std::uint64_t> step_counts;  // per parameter
    std::vector<std::uint8_t> present;       // per parameter, in the running step, as its stream has got there
    std::vector<std::uint8_t> requested;     // ... as the trainer has asked for it
    std::unique_ptr<bool[]> contributes;     // per chunk, scratch of a commit
  };
  struct Expected {
    schedule::Index entry;
    std::uint64_t pass;  // serial
    std::size_t index;
  };
  // A queue that allocates no more once it has grown (a deque takes and gives blocks for ever).
  class ExpectedQueue {
   public:
    bool empty() const { return head_ == items_.size(); }
    std::size_t size() const { return items_.size() - head_; }
    const Expected& front() const { return items_[head_]; }
    void push_back(const Expected& expected) { items_.push_back(expected); }
    void pop_front() {
      if (2 * ++head_ < items_.size()) return;
      items_.erase(items_.begin(), items_.begin() + static_cast<std::ptrdiff_t>(head_));
      head_ = 0;
    }
    void clear() {
      items_.clear();
      head_ = 0;
    }

   private:
    std::vector<Expected> items_;
    std::size_t head_ = 0;
  };
  struct RunningStep {
    bool active = false;
    bool decided = false;
    bool finished_backward = false;
    StepOptions options;
    int covered = 0;  // micro-batches of ended passes
    GradientNorm norm;
  };
  struct RunningPass {
    bool active = false;
    bool within_step = false;
    PassOptions options;
    std::uint64_t serial = 0;
  };
  // A communicator that units name, and those at the same place on the other ranks: together they hold all ranks.
  struct UnitCommunicator {
    std::shared_ptr<Communicator> communicator;
    std::vector<std::vector<std::uint32_t>> groups;  // ranks of the world: by first rank, and in the order of each
  };
  // Gradients whose squares go into the norm alike.
  struct NormPart {
    std::uint32_t communicator = 0;  // as in UnitLayout
    double divisor = 1;              // the ranks' part of it
    bool counted = true;             // false: only known to be finite
    engine::Partition partition;
  };

  bool forked() const;  // this is a child of the process that made the engine
  void require_committed() const;
  void require_initialized() const;
  const engine::UnitLayout& unit_layout(UnitId unit) const;
  const engine::ParameterLayout& parameter_layout(ParameterId id) const;
  Lease& lease_of(std::uint64_t id);
  std::uint64_t new_lease(std::uint32_t unit, bool gradient, schedule::Index entry, offload::Stream* stream);
  void end_lease(Lease& lease);
  void pass_gate(Lease& lease);
  void wait_for_gate(Lock& lock, Lease& lease);
  std::string second_commit_text(std::uint32_t unit) const;
  static offload::Stream& stream_of(const Stream& stream);

  schedule::Index open(Lock& lock, std::uint32_t unit, bool gradient);
  std::uint64_t place_on_demand(std::uint32_t unit, bool gradient);
  void drop_expected();
  void sync_expected();
  void note_update_queued(std::uint32_t unit, bool gradient, const engine::Trace* trace, std::size_t index);
  void forget_update_queued(std::uint32_t unit);
  int next_micro_batches() const { return pass_.options.micro_batches; }  // of the pass after this: as this one
  void top_up(Lock& lock);
  bool several_ranks() const { return plan_.world_size > 1; }
  // Durable steps (engine_durable.cc).
  struct StoredRun {
    engine::StoredLayout layout;
    engine::Manifest manifest;
    engine::StoredChunks state;
    std::string path;
    std::optional<engine::Manifest> older;  // where every rank has it
  };
  std::shared_ptr<io::SmallFiles> committed_files() const;  // where the manifests of all ranks of a machine lie
  engine::ManifestLog manifest_log() const;
  engine::StoredLayout stored_layout() const;
  // Where each parameter of this engine lies in what is stored: unit and parameter there, by those here.
  struct StoredPlaces {
    std::vector<std::vector<std::pair<std::uint32_t, std::uint32_t>>> places;
    bool as_here = true;  // at the same places, the same ones frozen
    std::string note;     // what is trained or frozen otherwise than there
  };
  StoredPlaces places_in(const engine::StoredLayout& there, const std::string& where) const;
  bool same_place(const engine::StoredLayout& there) const;
  void begin_durable(std::optional<StoredRun> stored);
  // Going on from what is stored (engine_resume.cc).
  struct CommittedSteps;
  using Source = std::pair<std::uint64_t, std::vector<std::string>>;  // a step, and the paths that hold it
  std::optional<StoredRun> find_stored_run(const CommitOptions& options);
  CommittedSteps committed_steps(bool read);
  std::uint64_t moved_step();
  std::uint64_t interrupted_step(const CommittedSteps& found);
  std::string moved_path(std::size_t path) const;
  template <class Work>
  void on_first_rank(const Work& work);
  void move_stored_run();
  void finish_interrupted_move();
  void forget_manifests();
  void forget_moved_run();
  void forget_stored_run();
  void meet_runs_of_other_paths(const CommitOptions& options);
  void meet_checkpoints(const CommitOptions& options);
  std::vector<Source> checkpoints_in(const std::string& folder);
  std::optional<StoredRun> stored_in_place(const CommittedSteps& found, std::uint64_t step);
  void restore_stored_run(StoredRun& stored);
  void load_states();
  void load_state(engine::StoredState& state, const StoredPlaces& there);
  void finish_loading(const engine::StoredState& state, const StoredPlaces& there, const std::string& path);
  // Checkpoints (engine_checkpoint.cc).
  void require_between_steps(const char* what) const;
  bool holds_checkpoint_part() const;
  io::ChunkStoreOptions checkpoint_store(const std::string& folder) const;
  engine::Manifest manifest_of_now() const;
  void save_now(const std::string& path, std::size_t keep);
  void save_beside_training(const std::string& path, std::size_t keep);
  void agree_on_save(bool wait);
  void watch_save();
  void end_save() noexcept;
  void write_states(const std::string& folder);
  bool agree_all_good(bool good);
  void sum_over_all(Communicator& communicator, std::span<double> values);
  void request_commit(std::span<const std::byte> user_bytes);
  void finish_commit(Lock& lock);
  bool commits_step(std::uint64_t step) const { return plan_.durable && step % config_.durability.every_steps == 0; }
  void agree_on_start();
  void meet_unit_communicators();
  void forget_whole_worlds();
  std::uint32_t communicator_number(const std::string& unit, const UnitOptions& options);
  std::uint32_t check_members(std::uint32_t number, std::uint64_t world);
  static std::string parameters_text(const engine::UnitSpec& unit, bool names);
  void divide_machine();
  void check_machine_memory();
  // What the trainer asks for, as it must be the same on all ranks.
  enum class Asked : std::uint8_t {
    begin_step,
    begin_pass,
    begin_evaluation,
    acquire,
    gradients,
    commit,
    commit_partial,
    update,
    discard,
  };
  void note_asked(Asked what, std::uint64_t value = 0);
  std::string asked_text(Asked what, std::uint32_t value) const;
  std::string step_options_text() const;
  bool agree_on_backward(bool adds);
  void agree_on_presence();
  void gather_elements(ParameterId id, std::int64_t first_element, std::span<float> values);
  void agree_on_name(std::string& name);
  void sort_norm_parts();
  void sum_locally();
  double sum_over_ranks(std::size_t part) const;
  GradientNorm global_norm(const AddOthers& add_others);
  void agree_on_total(GradientTotal& total);
  double rank_divisor(std::uint32_t unit) const;
  double gradient_divisor(double ranks) const;
  schedule::Index append(std::uint32_t unit, bool gradient, std::uint64_t offset, const engine::Trace* trace,
                         std::size_t index, bool next_step, bool last_pass, bool leased);
  void force_updates(Lock& lock, std::uint32_t unit);
  bool last_pass_of_step() const;

  static void on_gate(void* self, std::uint64_t lease);
  static void on_other_gate(void* self, std::uint64_t lease);
  static void on_release(void* self, std::uint64_t lease);
  static void on_commit(void* self, std::uint64_t lease);
  void committed(std::uint64_t lease_id);
  bool contributed_to(std::uint32_t unit) const;
  void prepare_update(std::uint32_t unit, double gradient_scale);
  double learning_rate(int group) const;
  bool has_group(int group) const;
  double weight_decay(int group) const;
  std::string first_non_finite() const;
  template <class Visit>
  void visit_elements(ParameterId id, std::int64_t first_element, std::size_t count, const Visit& visit);

  Config config_;
  EngineEnvironment environment_;
  engine::TestHooks* hooks_ = nullptr;
  std::shared_ptr<offload::Device> device_;
  std::shared_ptr<Communicator> communicator_;
  offload::MachineShare share_;
  int owner_process_ = 0;
  int exceptions_before_ = 0;                         // that were on their way when the engine was made
  std::shared_ptr<Communicator> shard_communicator_;  // the ranks that hold one copy of everything together
  std::vector<UnitCommunicator> unit_communicators_;  // UnitSpec::communicator - 1 is the place
  std::vector<std::optional<double>> divisors_;       // per unit, as given
  std::vector<engine::UnitSpec> specs_;
  std::set<std::string> unit_names_;
  std::vector<ExpectedAccess> expected_order_;
  int expected_micro_batches_ = 1;
  bool committed_ = false;
  bool initialized_ = false;
  engine::Plan plan_;
  std::vector<UnitState> units_;
  std::vector<std::uint8_t> chunk_contributed_;  // in the running step
  std::vector<NormPart> norm_parts_;             // the same on all ranks
  std::vector<std::uint32_t> chunk_parts_;       // per chunk: its part of the norm
  std::vector<double> local_sums_, all_sums_;    // per part; of all ranks
  engine::LossScaler loss_scaler_;
  // Several ranks: what has been asked for since all of them have last compared it, and a fingerprint of all of it. The
  // list ends where it is long.
  std::vector<std::pair<Asked, std::uint32_t>> asked_;
  std::uint64_t asked_count_ = 0, asked_fingerprint_ = 0;
  std::vector<std::uint64_t> words_of_all_;

  std::vector<std::unique_ptr<offload::Stream>> streams_;
  std::unique_ptr<engine::Executor> executor_;
  std::unique_ptr<engine::StepCommitter> committer_;  // with durable steps
  // A checkpoint on its way; with several ranks all have one or none, and have seen the same of it.
  enum class SavePhase : std::uint8_t { copying, publishing, published, failed };
  std::unique_ptr<engine::CheckpointSave> save_;
  SavePhase save_phase_ = SavePhase::copying;
  std::string save_path_;
  bool save_in_place_ = false;                       // a failed one that is whole all the same
  std::shared_ptr<Communicator> save_communicator_;  // several ranks: for words about it, on the callers' threads
  std::optional<ResumedStep> resumed_;
  std::vector<Source> sources_;  // at commit: stored states to load from, the first that is whole
  std::vector<std::byte> last_user_bytes_;
  bool updates_begun_ = false;  // eager: the running step's
  std::deque<Lease> leases_;    // addresses stay
  std::vector<std::uint32_t> free_leases_;
  std::uint32_t commits_pending_ = 0;

  RunningStep step_;
  RunningPass pass_;
  std::map<std::pair<Pass, std::uint64_t>, engine::Trace> traces_;
  engine::Trace* trace_ = nullptr;       // of the running pass, or of the last one
  engine::Trace* next_trace_ = nullptr;  // expected for the pass after it
  bool following_ = false;               // the running pass keeps to trace_
  std::size_t position_ = 0;             // next opening of trace_
  ExpectedQueue expected_;
  std::uint64_t ahead_pass_ = 1;  // where to append next: pass serial (the first is 1) and opening
  std::size_t ahead_index_ = 0;
  std::uint64_t cancellations_seen_ = 0;
  std::uint64_t queued_chunks_ = 0;  // of units with update_queued
  std::pair<Pass, std::uint64_t> last_train_{Pass::train, 0};
  int expected_step_micro_batches_ = 1;
  std::size_t most_expected_ = SIZE_MAX;  // several ranks: the same on all of them
  engine::TraceRecorder recorder_;
  std::uint64_t layout_generation_ = 1;
  std::uint64_t steps_updated_ = 0, steps_discarded_ = 0, acquires_ = 0, prefetched_ = 0, repairs_ = 0;
};

}  // namespace ballast
