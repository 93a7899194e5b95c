// The trainer's loop over the engine. The host runs ahead: it acquires, enqueues and releases for the whole step, then
// waits in finish_backward. What is enqueued is a Job from a fixed list; a closure is two pointers, so no step
// allocates. SPDX-License-Identifier: Apache-2.0
#include "trainer.h"

#include <ballast/base/random.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <span>
#include <sstream>
#include <utility>
#include <vector>

#include "math.h"
#include "pool.h"
#include "rows.h"

namespace ballast::gpt {
namespace {

constexpr std::uint64_t kFillStream = 0x66696C6C;  // keeps the streams of one seed apart
constexpr std::uint64_t kTrainStream = 0x747261696E;
constexpr std::uint64_t kEvaluateStream = 0x6576616C;
constexpr float kDeviation = 0.02f;

// What is committed with every step.
struct Position {
  std::uint64_t magic = 0x3254504753414c42;  // tells whose bytes they are, and of which version
  std::uint64_t next_step = 0;
  std::uint64_t seed = 0;
  std::int64_t batch = 0, sequence = 0, micro_batches = 0;
  std::uint64_t data = 0;     // fingerprint
  double learning_rate = -1;  // where given beside the configuration
};

View view_of(const Tensor& tensor) { return {tensor.data, tensor.dtype}; }

std::string text(std::int64_t value) { return std::to_string(value); }

}  // namespace

class GptTrainer::Implementation {
 public:
  Implementation(Engine& engine, const GptShape& shape, const TrainSettings& settings,
                 std::shared_ptr<const TokenData> data)
      : engine_(engine), shape_(shape), settings_(settings), data_(std::move(data)) {
    settings.validate(shape);
    data_->require_sequence(settings.sequence);
    data_fingerprint_ = data_->fingerprint();
    const Config& config = engine.config();
    sequences_ = settings.batch / settings.micro_batches / settings.world_size;
    const bool vertical = settings.order == MicroBatchOrder::vertical;
    MathOptions options;
    options.sequences = sequences_;
    options.sequence = settings.sequence;
    options.slots = vertical ? settings.micro_batches : 1;
    options.parameters = config.precision.parameters;
    options.gradients = config.precision.gradients;
    options.threads = settings.threads > 0 ? settings.threads : default_threads();
    options.admit_memory = settings.admit_memory;
    math_ = GptMath::create(shape, options);

    for (GptUnit& unit : gpt_units(shape)) {
      const std::size_t count = unit.parameters.size();
      units_.push_back(engine.add_unit(std::move(unit.name), std::move(unit.parameters)));
      ids_.emplace_back();
      for (std::uint32_t i = 0; i < count; ++i) ids_.back().push_back({units_.back().index, i});
    }
    engine.expect_order(gpt_access_order(shape, units_, static_cast<int>(options.slots)),
                        static_cast<int>(settings.micro_batches));
    stream_ = engine.stream();

    const auto batch_tokens = static_cast<std::size_t>(settings.micro_batches * sequences_ * (settings.sequence + 1));
    const auto jobs = static_cast<std::size_t>(settings.micro_batches * (2 * shape.layers + 4));
    if (settings.admit_memory) settings.admit_memory(batch_tokens * 4 + jobs * sizeof(Job));
    batch_.resize(batch_tokens);
    losses_.resize(static_cast<std::size_t>(settings.micro_batches));
    jobs_.resize(jobs);
    step_options_.micro_batches = static_cast<int>(settings.micro_batches);
    discards_max_ = config.loss_scale.kind == Config::LossScale::Kind::dynamic ? kDiscardsMaxScaled : kDiscardsMax;
  }

  void fill(ParameterId parameter, std::int64_t first, std::span<float> values) const {
    const std::size_t unit = parameter.unit - units_.front().index;
    const bool first_unit = unit == 0, last_unit = unit + 1 == units_.size();
    bool matrix = first_unit || (last_unit && parameter.index == final_unit::lm_head), ones = false;
    float deviation = kDeviation;
    if (last_unit) {
      ones = parameter.index == final_unit::ln_f_weight;
    } else if (!first_unit) {
      ones = parameter.index == block::ln_1_weight || parameter.index == block::ln_2_weight;
      const bool residual = parameter.index == block::c_proj_weight || parameter.index == block::mlp_c_proj_weight;
      matrix = residual || parameter.index == block::c_attn_weight || parameter.index == block::c_fc_weight;
      if (residual) deviation /= std::sqrt(2.0f * static_cast<float>(shape_.layers));
    }
    if (!matrix) {
      std::fill(values.begin(), values.end(), ones ? 1.0f : 0.0f);
      return;
    }
    const std::uint64_t key =
        base::random_at(base::random_at(settings_.seed, kFillStream), (std::uint64_t{unit} << 8) | parameter.index);
    rows::fill_normal(key, first, values.data(), static_cast<std::int64_t>(values.size()), deviation);
  }

  StepResult step(std::uint64_t index, std::optional<double> learning_rate) {
    draw(*data_, kTrainStream, index);
    step_options_.learning_rate = learning_rate;
    const double rate = learning_rate ? *learning_rate : scheduled_rate();
    step_options_.group_rates.assign(1, {kNoDecayGroup, rate, 0.0});
    Step step = engine_.begin_step(step_options_);
    loss_scale_ = step.loss_scale();
    passes(Pass::train, [&](const PassOptions& options) { return step.begin_pass(options); });
    const GradientNorm norm = step.finish_backward();
    StepResult result;
    result.learning_rate = rate;
    result.loss = mean_loss();
    result.grad_norm = norm.value;
    result.updated = norm.finite;
    if (norm.finite) {
      const Position position{.next_step = index + 1,
                              .seed = settings_.seed,
                              .batch = settings_.batch,
                              .sequence = settings_.sequence,
                              .micro_batches = settings_.micro_batches,
                              .data = data_fingerprint_,
                              .learning_rate = learning_rate.value_or(-1)};
      step.update(std::as_bytes(std::span(&position, 1)));
      discards_ = 0;
      return result;
    }
    step.discard();
    if (++discards_ >= discards_max_) {
      throw Error("step " + std::to_string(index) + ": the gradient is not finite for the " + text(discards_) +
                  "th step in a row (first in " + norm.non_finite_parameter + ", loss " + std::to_string(result.loss) +
                  ", loss scale " + std::to_string(loss_scale_) + "); a smaller learning rate may cure it");
    }
    return result;
  }

  std::uint64_t next_step(std::span<const std::byte> user_bytes, std::optional<double> learning_rate,
                          std::string* differs) const {
    Position position;
    differs->clear();
    if (user_bytes.empty()) return 0;  // the state before any step
    const std::uint64_t magic = position.magic;
    if (user_bytes.size() == sizeof position) std::memcpy(&position, user_bytes.data(), sizeof position);
    if (user_bytes.size() != sizeof position || position.magic != magic)
      throw ConfigError("the committed run was not written by this trainer, so its place in the data is not known");
    const auto add = [&](const std::string& what) { *differs += (differs->empty() ? "" : ", ") + what; };
    const auto compare = [&](const char* name, auto before, auto now) {
      if (before == now) return;
      std::ostringstream numbers;
      numbers << name << " (" << before << " before, " << now << " now)";
      add(numbers.str());
    };
    compare("seed", position.seed, settings_.seed);
    compare("batch", position.batch, settings_.batch);
    compare("sequence", position.sequence, settings_.sequence);
    compare("micro-batches", position.micro_batches, settings_.micro_batches);
    const double configured = engine_.config().optimizer.learning_rate;
    compare("learning rate", position.learning_rate < 0 ? configured : position.learning_rate,
            learning_rate.value_or(configured));
    if (position.data != data_fingerprint_) add("the data, now " + data_->path());
    return position.next_step;
  }

  double evaluate(std::uint64_t index, const TokenData* data) {
    draw(data != nullptr ? *data : *data_, kEvaluateStream, index);
    passes(Pass::evaluate, [&](const PassOptions& options) { return engine_.begin_pass(options); });
    return mean_loss();
  }

  std::uint64_t tokens_per_step() const { return static_cast<std::uint64_t>(settings_.batch * settings_.sequence); }
  std::uint64_t activation_bytes() const { return math_->memory_bytes(); }
  const std::string& maths_note() const { return math_->note(); }

 private:
  enum class Kind : std::uint8_t { embed, block, head, head_gradients, block_gradients, embedding_gradients };
  // One piece of maths with all the addresses it needs.
  struct Job {
    Implementation* owner = nullptr;
    Kind kind = Kind::embed;
    std::int64_t micro_batch = 0, slot = 0, layer = 0;
    std::array<View, block::kCount> parameters, gradients;  // of the unit; the others' are shorter
    View head;
    double gradient_scale = 0;
  };

  // The engine's own for its next update, which it has for the other group.
  double scheduled_rate() const {
    const Config& config = engine_.config();
    const bool constant = config.learning_rate_schedule.type == "constant";
    return config.learning_rate(constant ? 0 : engine_.report().steps_updated);
  }

  // Reads all of this rank's sequences of a batch. Nothing is in flight: the last step ended with synchronize().
  void draw(const TokenData& data, std::uint64_t stream, std::uint64_t index) {
    stream_.synchronize();  // only where an exception cut the last step short does this wait
    const std::uint64_t seed = base::random_at(settings_.seed, stream);
    const std::int64_t of_all_ranks = sequences_ * settings_.world_size, length = settings_.sequence + 1;
    for (std::int64_t m = 0; m < settings_.micro_batches; ++m) {
      for (std::int64_t s = 0; s < sequences_; ++s) {
        const auto row = static_cast<std::uint64_t>(m * of_all_ranks + settings_.rank * sequences_ + s);
        data.read(data.sequence_offset(seed, index, row, settings_.sequence),
                  std::span(batch_).subspan(static_cast<std::size_t>((m * sequences_ + s) * length),
                                            static_cast<std::size_t>(length)),
                  shape_.vocabulary);
      }
    }
    jobs_used_ = 0;
  }

  template <class BeginPass>
  void passes(Pass kind, BeginPass&& begin) {
    const std::int64_t count = settings_.micro_batches;
    const std::int64_t per_pass = settings_.order == MicroBatchOrder::vertical ? count : 1;
    for (std::int64_t first = 0; first < count; first += per_pass) {
      PassScope scope = begin(PassOptions{.kind = kind, .micro_batches = static_cast<int>(per_pass)});
      forward(first, per_pass);
      head(first, per_pass, kind == Pass::train);
      if (kind == Pass::train) backward(first, per_pass);
      scope.end();
    }
  }

  void forward(std::int64_t first, std::int64_t count) {
    {
      ParameterLease lease = engine_.acquire(units_.front(), stream_);
      for (std::int64_t slot = 0; slot < count; ++slot) {
        Job& job = next_job(Kind::embed, first, slot);
        views(lease, 0, job.parameters);
        enqueue(job);
      }
      lease.release(stream_);
    }
    for (std::int64_t layer = 0; layer < shape_.layers; ++layer) {
      const auto unit = static_cast<std::size_t>(layer) + 1;
      ParameterLease lease = engine_.acquire(units_[unit], stream_);
      for (std::int64_t slot = 0; slot < count; ++slot) {
        Job& job = next_job(Kind::block, first, slot);
        job.layer = layer;
        views(lease, unit, job.parameters);
        enqueue(job);
      }
      lease.release(stream_);
    }
  }

  // The loss, and the gradients of the last unit. With one micro-batch the parameters go before the gradients come: of
  // a large vocabulary the device then never holds both.
  void head(std::int64_t first, std::int64_t count, bool train) {
    const std::size_t last = units_.size() - 1;
    const bool tied = shape_.tie_embeddings;
    ParameterLease lease = engine_.acquire(units_[last], stream_), table;
    if (tied) table = engine_.acquire(units_.front(), stream_);
    for (std::int64_t slot = 0; slot < count; ++slot) {
      Job& job = next_job(Kind::head, first, slot);
      views(lease, last, job.parameters);
      job.head = tied ? view_of(table[ids_.front()[embedding::wte]]) : job.parameters[final_unit::lm_head];
      job.gradient_scale = train ? loss_scale_ : 0;
      enqueue(job);
      if (slot + 1 == count) {
        if (tied) table.release(stream_);
        lease.release(stream_);
      }
      if (train) head_gradients(first, slot, slot + 1 == count);
    }
  }

  void head_gradients(std::int64_t first, std::int64_t slot, bool last_slot) {
    const std::size_t last = units_.size() - 1;
    GradientLease lease = engine_.gradients(units_[last], stream_), table;
    if (shape_.tie_embeddings) table = engine_.gradients(units_.front(), stream_);
    Job& job = next_job(Kind::head_gradients, first, slot);
    views(lease, last, job.gradients);
    if (shape_.tie_embeddings) {
      job.head = view_of(table[ids_.front()[embedding::wte]]);
      table.absent(ids_.front()[embedding::wpe]);
    } else {
      job.head = job.gradients[final_unit::lm_head];
    }
    enqueue(job);
    if (shape_.tie_embeddings) table.commit_partial(stream_);
    commit(lease, last_slot);
  }

  void backward(std::int64_t first, std::int64_t count) {
    for (std::int64_t layer = shape_.layers - 1; layer >= 0; --layer) {
      const auto unit = static_cast<std::size_t>(layer) + 1;
      ParameterLease lease = engine_.acquire(units_[unit], stream_);
      for (std::int64_t slot = 0; slot < count; ++slot) {
        GradientLease gradients = engine_.gradients(units_[unit], stream_);
        Job& job = next_job(Kind::block_gradients, first, slot);
        job.layer = layer;
        views(lease, unit, job.parameters);
        views(gradients, unit, job.gradients);
        enqueue(job);
        commit(gradients, slot + 1 == count);
      }
      lease.release(stream_);
    }
    for (std::int64_t slot = 0; slot < count; ++slot) {
      GradientLease gradients = engine_.gradients(units_.front(), stream_);
      Job& job = next_job(Kind::embedding_gradients, first, slot);
      views(gradients, 0, job.gradients);
      enqueue(job);
      commit(gradients, slot + 1 == count);
    }
  }

  void commit(GradientLease& lease, bool last) {
    if (last) {
      lease.commit(stream_);
    } else {
      lease.commit_partial(stream_);
    }
  }

  template <class Lease>
  void views(const Lease& lease, std::size_t unit, std::array<View, block::kCount>& out) const {
    for (std::size_t i = 0; i < ids_[unit].size(); ++i) out[i] = view_of(lease[ids_[unit][i]]);
  }

  Job& next_job(Kind kind, std::int64_t first, std::int64_t slot) {
    Job& job = jobs_.at(jobs_used_++);
    job.owner = this;
    job.kind = kind;
    job.micro_batch = first + slot;
    job.slot = slot;
    return job;
  }
  void enqueue(Job& job) {
    Job* pointer = &job;
    stream_.enqueue([pointer] { pointer->owner->run(*pointer); });
  }

  // On the stream.
  void run(const Job& job) {
    switch (job.kind) {
      case Kind::embed:
        take_tokens(job);
        math_->embedding_forward(job.slot, first_of<EmbeddingViews>(job.parameters));
        return;
      case Kind::block:
        math_->block_forward(job.slot, job.layer, job.parameters);
        return;
      case Kind::head:
        losses_[static_cast<std::size_t>(job.micro_batch)] =
            math_->head_loss(job.slot, first_of<FinalViews>(job.parameters), job.head, job.gradient_scale);
        return;
      case Kind::head_gradients:
        math_->head_gradients(job.slot, first_of<FinalViews>(job.gradients), job.head);
        return;
      case Kind::block_gradients:
        math_->block_backward(job.slot, job.layer, job.parameters, job.gradients);
        return;
      case Kind::embedding_gradients:
        math_->embedding_backward(job.slot, first_of<EmbeddingViews>(job.gradients));
        return;
    }
  }

  template <class Views>
  static Views first_of(const std::array<View, block::kCount>& views) {
    Views result;
    std::copy_n(views.begin(), result.size(), result.begin());
    return result;
  }

  void take_tokens(const Job& job) {
    const auto length = static_cast<std::size_t>(settings_.sequence);
    std::uint32_t* tokens = math_->tokens(job.slot).data();
    std::uint32_t* targets = math_->targets(job.slot).data();
    const std::uint32_t* source = batch_.data() + static_cast<std::size_t>(job.micro_batch * sequences_) * (length + 1);
    for (std::int64_t s = 0; s < sequences_; ++s, tokens += length, targets += length, source += length + 1) {
      std::copy_n(source, length, tokens);
      std::copy_n(source + 1, length, targets);
    }
  }

  double mean_loss() {
    stream_.synchronize();
    double sum = 0;
    for (const double loss : losses_) sum += loss;
    return sum / static_cast<double>(losses_.size());
  }

  Engine& engine_;
  const GptShape shape_;
  const TrainSettings settings_;
  const std::shared_ptr<const TokenData> data_;
  std::uint64_t data_fingerprint_ = 0;
  std::int64_t sequences_ = 0;  // of this rank in one micro-batch
  std::unique_ptr<GptMath> math_;
  std::vector<UnitId> units_;
  std::vector<std::vector<ParameterId>> ids_;
  Stream stream_;
  std::vector<std::uint32_t> batch_;  // micro-batch, sequence: its tokens and the one after
  std::vector<double> losses_;        // per micro-batch
  std::vector<Job> jobs_;             // of one step, in the order of the stream
  std::size_t jobs_used_ = 0;
  StepOptions step_options_;
  double loss_scale_ = 1;
  int discards_ = 0, discards_max_ = kDiscardsMax;
};

GptTrainer::GptTrainer(Engine& engine, const GptShape& shape, const TrainSettings& settings,
                       std::shared_ptr<const TokenData> data)
    : implementation_(std::make_unique<Implementation>(engine, shape, settings, std::move(data))) {}
GptTrainer::~GptTrainer() = default;

Engine::Fill GptTrainer::fill() const {
  return [implementation = implementation_.get()](ParameterId parameter, std::int64_t first, std::span<float> values) {
    implementation->fill(parameter, first, values);
  };
}
StepResult GptTrainer::step(std::uint64_t index, std::optional<double> learning_rate) {
  return implementation_->step(index, learning_rate);
}
std::uint64_t GptTrainer::next_step(std::span<const std::byte> user_bytes, std::optional<double> learning_rate,
                                    std::string* differs) const {
  return implementation_->next_step(user_bytes, learning_rate, differs);
}
double GptTrainer::evaluate(std::uint64_t index, const TokenData* data) {
  return implementation_->evaluate(index, data);
}
std::uint64_t GptTrainer::tokens_per_step() const { return implementation_->tokens_per_step(); }
std::uint64_t GptTrainer::activation_bytes() const { return implementation_->activation_bytes(); }
const std::string& GptTrainer::maths_note() const { return implementation_->maths_note(); }

}  // namespace ballast::gpt
