// A trainer without matrix products: gradients are fixed functions of the parameters, the step and the micro-batch, so
// that trajectories can be compared bit by bit and a reference can be computed in a few lines.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/base/random.h>
#include <ballast/engine/engine.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

namespace ballast::testing {

// A directory of its own, removed at the end.
class TemporaryDirectory {
 public:
  TemporaryDirectory() : TemporaryDirectory(std::getenv("TMPDIR") != nullptr ? std::getenv("TMPDIR") : "/tmp") {}
  explicit TemporaryDirectory(const std::string& base) {
    path_ = base + "/ballast-test-XXXXXX";
    if (::mkdtemp(path_.data()) == nullptr) throw std::runtime_error("mkdtemp " + path_);
  }
  ~TemporaryDirectory() { [[maybe_unused]] const int status = std::system(("rm -rf '" + path_ + "'").c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline float bf16_value(std::uint16_t bits) {
  const std::uint32_t wide = std::uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

inline std::uint16_t bf16_bits(float value) {  // truncation is enough for gradients that tests make up
  std::uint32_t wide;
  std::memcpy(&wide, &value, 4);
  return static_cast<std::uint16_t>(wide >> 16);
}

struct SyntheticUnit {
  std::string name;
  std::vector<ParameterSpec> parameters;
  bool trainable = true;
  UnitOptions options = {};
};

struct SyntheticOptions {
  int micro_batches = 1;
  bool tied = false;  // unit 0 is used again after the others, with a gradient of its own
  double gradient_size = 0.01;
  int micro_stride = 1, micro_offset = 0;  // micro-batch m is number m * stride + offset of all ranks'
  std::function<bool(int step)> poison;    // puts a NaN into the first gradient
  std::function<double(int step)> rate;    // the step's learning rate
  std::function<bool(int step, int micro_batch, ParameterId)> absent;  // no gradient for this parameter
  std::function<bool(int step)> evaluate_before;                       // an evaluation pass before the step
  AddOthers add_others;                                                // for finish_backward
  // How host code computes in order with a stream, and sees memory of the device, where not as on the host device.
  std::function<void(Stream, std::function<void()>)> run;
  std::function<void*(void*)> view;
  std::function<Stream(Engine&)> stream;  // the trainer's own; nothing: the engine's
};

class SyntheticTrainer {
 public:
  SyntheticTrainer(Engine& engine, const std::vector<SyntheticUnit>& units, SyntheticOptions options = {})
      : engine_(engine), units_(units), options_(std::move(options)) {
    for (const SyntheticUnit& unit : units_) {
      ids_.push_back(engine_.add_unit(unit.name, unit.parameters, unit.options));
    }
    if (options_.tied) {
      std::vector<ExpectedAccess> order;
      for (UnitId id : ids_) order.push_back({id, true, false});
      order.push_back({ids_[0], true, false});
      order.push_back({ids_[0], true, true});
      for (std::size_t i = ids_.size(); i-- > 0;) order.push_back({ids_[i], i > 0, true});
      engine_.expect_order(order, options_.micro_batches);
    } else if (options_.micro_batches > 1) {
      std::vector<ExpectedAccess> order;
      for (UnitId id : ids_) order.push_back({id, true, false});
      for (std::size_t i = ids_.size(); i-- > 0;) order.push_back({ids_[i], true, units_[i].trainable});
      engine_.expect_order(order, options_.micro_batches);
    }
  }

  static float initial(ParameterId id, std::int64_t element) {
    const std::uint64_t bits = base::random_at(7 + id.unit * 131 + id.index, static_cast<std::uint64_t>(element));
    return static_cast<float>(static_cast<double>(bits >> 40) * 0x1p-24 - 0.5);
  }

  void initialize() {
    engine_.initialize([](ParameterId id, std::int64_t first, std::span<float> values) {
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = initial(id, first + static_cast<std::int64_t>(i));
    });
  }

  // Returns a sum over what forward saw of the parameters: the "loss", exact to the bit.
  double step() {
    const int number = step_++;
    Stream stream = options_.stream ? options_.stream(engine_) : engine_.stream();
    if (options_.evaluate_before && options_.evaluate_before(number)) {
      auto pass = engine_.begin_pass({.kind = Pass::evaluate});
      for (std::size_t u = 0; u < ids_.size(); ++u) {
        auto lease = engine_.acquire(ids_[u], stream);
        lease.release(stream);
      }
    }
    loss_ = 0;
    StepOptions declared{.micro_batches = options_.micro_batches};
    if (options_.rate) declared.learning_rate = options_.rate(number);
    auto step = engine_.begin_step(declared);
    for (int micro = 0; micro < options_.micro_batches; ++micro) {
      auto pass = step.begin_pass({.kind = Pass::train});
      const int all = micro * options_.micro_stride + options_.micro_offset;
      for (std::size_t u = 0; u < ids_.size(); ++u) forward(u, stream);
      if (options_.tied) {
        forward(0, stream);
        backward(0, stream, number, all, true, true);
      }
      for (std::size_t u = ids_.size(); u-- > 0;) {
        if (units_[u].trainable) {
          backward(u, stream, number, all, false, !(options_.tied && u == 0));
        } else {
          forward(u, stream);
        }
      }
    }
    last_norm_ = step.finish_backward(options_.add_others);
    if (last_norm_.finite) {
      step.update(std::as_bytes(std::span(&step_, 1)));
    } else {
      step.discard();
    }
    stream.synchronize();
    return loss_;
  }

  // Where the engine goes on from a committed step; false where there is none.
  bool resume() {
    if (!engine_.resumed()) return false;
    const std::vector<std::byte>& bytes = engine_.resumed()->user_bytes;
    step_ = 0;
    if (bytes.size() == sizeof step_) std::memcpy(&step_, bytes.data(), sizeof step_);
    return true;
  }
  int next_step() const { return step_; }

  GradientNorm last_norm() const { return last_norm_; }
  const std::vector<UnitId>& ids() const { return ids_; }

  // Every value of every parameter, in order.
  std::vector<float> values() {
    std::vector<float> all;
    for (std::size_t u = 0; u < ids_.size(); ++u) {
      for (std::uint32_t p = 0; p < units_[u].parameters.size(); ++p) {
        std::int64_t count = 1;
        for (std::int64_t d : units_[u].parameters[p].shape) count *= d;
        std::vector<float> part(static_cast<std::size_t>(count));
        engine_.read({ids_[u].index, p}, 0, part);
        all.insert(all.end(), part.begin(), part.end());
      }
    }
    return all;
  }

 private:
  static double checksum(const Tensor& tensor) {
    double sum = 0;
    for (std::int64_t i = 0; i < tensor.elements; ++i) sum += value(tensor, i) * static_cast<double>(i % 17 + 1);
    return sum;
  }
  static float value(const Tensor& tensor, std::int64_t i) {
    if (tensor.dtype == DataType::bf16) return bf16_value(static_cast<const std::uint16_t*>(tensor.data)[i]);
    if (tensor.dtype == DataType::fp32) return static_cast<const float*>(tensor.data)[i];
    return static_cast<float>(static_cast<const std::uint16_t*>(tensor.data)[i]) *
           0x1p-14f;  // the bits of fp16, as a number
  }

  void compute(Stream stream, std::function<void()> work) {
    if (options_.run) {
      options_.run(stream, std::move(work));
    } else {
      stream.enqueue(std::move(work));
    }
  }
  Tensor viewed(Tensor tensor) const {
    if (options_.view && tensor.data != nullptr) tensor.data = options_.view(tensor.data);
    return tensor;
  }

  void forward(std::size_t u, Stream stream) {
    auto lease = engine_.acquire(ids_[u], stream);
    for (std::uint32_t p = 0; p < units_[u].parameters.size(); ++p) {
      const Tensor tensor = lease[{ids_[u].index, p}];
      compute(stream, [this, tensor] { loss_ += checksum(viewed(tensor)); });
    }
    lease.release(stream);
  }

  void backward(std::size_t u, Stream stream, int number, int micro, bool partial, bool parameters) {
    ParameterLease lease;
    if (parameters) lease = engine_.acquire(ids_[u], stream);
    auto gradients = engine_.gradients(ids_[u], stream);
    for (std::uint32_t p = 0; p < units_[u].parameters.size(); ++p) {
      const ParameterId id{ids_[u].index, p};
      if (options_.absent && options_.absent(number, micro, id)) {
        gradients.absent(id);
        continue;
      }
      if (!units_[u].parameters[p].options.trainable) continue;
      const Tensor gradient = gradients[id];
      const Tensor parameter = parameters ? lease[id] : Tensor{};
      const bool poison = options_.poison && options_.poison(number) && u + 1 == ids_.size() && p == 0;
      const auto scale = static_cast<float>(options_.gradient_size);
      compute(stream, [=, this] {
        const Tensor out = viewed(gradient);
        const Tensor in = viewed(parameter);
        for (std::int64_t i = 0; i < out.elements; ++i) {
          const float x = in.data != nullptr ? value(in, i) : 0.125f;
          float g = scale * (x + 0.01f * static_cast<float>((i + number * 3 + micro * 5) % 11));
          if (poison && i == 0) g = NAN;
          if (out.dtype == DataType::fp32) {
            static_cast<float*>(out.data)[i] = g;
          } else {
            static_cast<std::uint16_t*>(out.data)[i] = bf16_bits(g);
          }
        }
      });
    }
    if (partial) {
      gradients.commit_partial(stream);
    } else {
      gradients.commit(stream);
    }
    if (parameters) lease.release(stream);
  }

  Engine& engine_;
  std::vector<SyntheticUnit> units_;
  SyntheticOptions options_;
  std::vector<UnitId> ids_;
  int step_ = 0;
  double loss_ = 0;
  GradientNorm last_norm_;
};

// A few units of uneven sizes.
inline std::vector<SyntheticUnit> small_model(int units = 4) {
  std::vector<SyntheticUnit> model;
  for (int u = 0; u < units; ++u) {
    const std::int64_t width = 300 + 41 * u;
    model.push_back(
        {"u." + std::to_string(u), {{"weight", {width, 33}}, {"bias", {width}, {.group = 1}}, {"scale", {}}}});
  }
  return model;
}

}  // namespace ballast::testing
