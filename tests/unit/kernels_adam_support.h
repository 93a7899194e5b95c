// The arrays of one Adam update in any combination of formats, as raw bytes that can be placed, cut and compared.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "ballast/base/check.h"
#include "ballast/base/random.h"
#include "ballast/kernels/adam.h"
#include "ballast/kernels/convert.h"

namespace ballast::kernels::testing {

struct Formats {
  ParameterFormat parameter;
  ElementType moment;
  ElementType gradient;

  std::string name() const {
    const char* const parameters[] = {"split_bf16", "fp16", "fp32"};
    const char* const elements[] = {"fp32", "bf16"};
    return std::string(parameters[static_cast<int>(parameter)]) + " parameters, " + elements[static_cast<int>(moment)] +
           " moments, " + elements[static_cast<int>(gradient)] + " gradients";
  }
};

inline std::vector<Formats> all_formats() {
  std::vector<Formats> all;
  for (const auto parameter : {ParameterFormat::split_bf16, ParameterFormat::fp16, ParameterFormat::fp32}) {
    for (const auto moment : {ElementType::fp32, ElementType::bf16}) {
      for (const auto gradient : {ElementType::fp32, ElementType::bf16}) all.push_back({parameter, moment, gradient});
    }
  }
  return all;
}

inline std::size_t element_bytes(ElementType type) { return type == ElementType::fp32 ? 4 : 2; }
inline std::size_t parameter_bytes(ParameterFormat format) { return format == ParameterFormat::fp32 ? 4 : 2; }
inline std::size_t master_bytes(ParameterFormat format) {
  return format == ParameterFormat::split_bf16 ? 2 : format == ParameterFormat::fp16 ? 4 : 0;
}

inline std::vector<float> read_elements(ElementType type, const std::byte* bytes, std::size_t count) {
  std::vector<float> values(count);
  if (type == ElementType::fp32) {
    if (count != 0) std::memcpy(values.data(), bytes, count * sizeof(float));
  } else {
    bf16_to_fp32(reinterpret_cast<const std::uint16_t*>(bytes), values.data(), count);
  }
  return values;
}

inline void write_elements(ElementType type, const std::vector<float>& values, std::byte* bytes) {
  if (type == ElementType::fp32) {
    if (!values.empty()) std::memcpy(bytes, values.data(), values.size() * sizeof(float));
  } else {
    fp32_to_bf16(values.data(), reinterpret_cast<std::uint16_t*>(bytes), values.size());
  }
}

class AdamState {
 public:
  enum Stream { kParameter, kMaster, kExpAvg, kExpAvgSq, kGradient, kPublished, kStreams };

  AdamState(Formats formats, const std::vector<float>& parameters) : formats_(formats), count_(parameters.size()) {
    for (int s = 0; s < kStreams; ++s) streams_[s].resize(count_ * bytes_per_element(s));
    set_parameters(parameters);
  }

  static AdamState random(Formats formats, std::size_t count, std::uint64_t seed) {
    base::Random random(seed);
    // Magnitudes over some decades, both signs; a few zeros.
    const auto draw = [&](double smallest, double decades) {
      const double magnitude = smallest * std::pow(10.0, decades * random.uniform());
      const std::uint64_t choice = random.below(64);
      return choice == 0 ? 0.0 : choice % 2 == 0 ? magnitude : -magnitude;
    };
    std::vector<float> p(count), m(count), v(count), g(count);
    for (std::size_t i = 0; i < count; ++i) {
      p[i] = static_cast<float>(draw(1e-4, 4.5));
      g[i] = static_cast<float>(draw(1e-9, 9));
      m[i] = static_cast<float>(draw(1e-9, 8));
      v[i] = static_cast<float>(std::abs(draw(1e-18, 16)));
    }
    AdamState state(formats, p);
    state.set(kExpAvg, m);
    state.set(kExpAvgSq, v);
    state.set(kGradient, g);
    return state;
  }

  std::size_t count() const { return count_; }
  Formats formats() const { return formats_; }
  std::size_t bytes_per_element(int stream) const {
    switch (stream) {
      case kMaster:
        return master_bytes(formats_.parameter);
      case kExpAvg:
      case kExpAvgSq:
        return element_bytes(formats_.moment);
      case kGradient:
        return element_bytes(formats_.gradient);
      default:
        return parameter_bytes(formats_.parameter);
    }
  }
  std::vector<std::byte>& bytes(int stream) { return streams_[static_cast<std::size_t>(stream)]; }
  const std::vector<std::byte>& bytes(int stream) const { return streams_[static_cast<std::size_t>(stream)]; }

  // The arrays from element `begin`; of other memory where `bases` gives it.
  AdamArrays arrays(std::size_t begin, std::array<std::byte*, kStreams> bases) const {
    AdamArrays a;
    a.parameter_format = formats_.parameter;
    a.moment_type = formats_.moment;
    a.gradient_type = formats_.gradient;
    void** const places[] = {&a.parameter, &a.master, &a.exp_avg, &a.exp_avg_sq};
    for (int s = kParameter; s <= kExpAvgSq; ++s) *places[s] = bases[s] + begin * bytes_per_element(s);
    a.gradient = bases[kGradient] + begin * bytes_per_element(kGradient);
    a.published = bases[kPublished] + begin * bytes_per_element(kPublished);
    return a;
  }
  AdamArrays arrays(std::size_t begin = 0) {
    std::array<std::byte*, kStreams> bases;
    for (int s = 0; s < kStreams; ++s) bases[s] = streams_[s].data();
    return arrays(begin, bases);
  }

  void update(const AdamScalars& scalars) { adam(scalars, arrays(), count_); }

  // The parameters at full precision.
  std::vector<float> parameters() const {
    if (formats_.parameter == ParameterFormat::fp32) return get(kParameter);
    if (formats_.parameter == ParameterFormat::fp16) return read_elements(ElementType::fp32, data(kMaster), count_);
    std::vector<float> values(count_);
    merge_fp32(reinterpret_cast<const std::uint16_t*>(data(kParameter)),
               reinterpret_cast<const std::uint16_t*>(data(kMaster)), values.data(), count_);
    return values;
  }
  void set_parameters(const std::vector<float>& values) {
    BALLAST_CHECK(values.size() == count_);
    auto* const half = reinterpret_cast<std::uint16_t*>(bytes(kParameter).data());
    switch (formats_.parameter) {
      case ParameterFormat::fp32:
        return write_elements(ElementType::fp32, values, bytes(kParameter).data());
      case ParameterFormat::fp16:
        write_elements(ElementType::fp32, values, bytes(kMaster).data());
        return fp32_to_fp16(values.data(), half, count_);
      case ParameterFormat::split_bf16:
        return split_fp32(values.data(), half, reinterpret_cast<std::uint16_t*>(bytes(kMaster).data()), count_);
    }
  }

  // Moments and gradients (and fp32 parameters) as fp32.
  std::vector<float> get(int stream) const { return read_elements(type_of(stream), data(stream), count_); }
  void set(int stream, const std::vector<float>& values) {
    BALLAST_CHECK(values.size() == count_);
    write_elements(type_of(stream), values, bytes(stream).data());
  }

  friend bool operator==(const AdamState& a, const AdamState& b) { return a.streams_ == b.streams_; }

 private:
  const std::byte* data(int stream) const { return bytes(stream).data(); }
  ElementType type_of(int stream) const {
    return stream == kGradient ? formats_.gradient : stream == kParameter ? ElementType::fp32 : formats_.moment;
  }

  Formats formats_;
  std::size_t count_;
  std::array<std::vector<std::byte>, kStreams> streams_;
};

}  // namespace ballast::kernels::testing
