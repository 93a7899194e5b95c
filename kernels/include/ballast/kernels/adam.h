// Adam and AdamW over one range of elements, in one pass over memory: unscale, clip, moments, decay, update, publish.
// Plain functions over pointers and counts: no threads, allocation, I/O or logging. Results do not depend on the
// instruction set, nor on how a range is cut into calls (of a NaN only that it is one). Multiply and add are rounded
// separately (no contraction); subnormal numbers are kept as long as the caller's thread keeps them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace ballast::kernels {

// Scalars of one update, computed in double and rounded to fp32 once. With g = gradient * gradient_scale:
//   L2 (adam):  g = g + weight_decay * p            decoupled (adamw): p = p * (1 - learning_rate * weight_decay)
//   m = beta1 * m + one_minus_beta1 * g
//   v = beta2 * v + one_minus_beta2 * (g * g)
//   p = p - step_size * m / (sqrt(v) * inverse_sqrt_correction2 + epsilon)
// where step_size = learning_rate / (1 - beta1^t) and inverse_sqrt_correction2 = 1 / sqrt(1 - beta2^t). p steps by the
// m and v that are stored: with bf16 moments they are rounded to nearest even first. (8-bit moments are too coarse for
// that: p steps by the m and v in fp32, which are stored after it, as in the paper that moments.h names.) Where
// step_size * m is zero p does not step, so it keeps its bits at learning rate 0, and where m, v and epsilon are all 0.
// The L2 gradient, a sum of two products that may cancel, is summed in double and rounded once. So each of m, v and p
// is within 4 ulp of the largest summand of its formula, evaluated exactly from these scalars and the stored m and v.
struct AdamScalars {
  float gradient_scale;  // 1 / (loss scale * micro-batches) * clip factor
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float step_size;
  float inverse_sqrt_correction2;
  float epsilon;
  float decay_factor;  // decoupled: 1 - learning_rate * weight_decay, else 1
  float l2_decay;      // L2: weight_decay, else 0
};

struct AdamHyperparameters {
  double learning_rate;
  double beta1;
  double beta2;
  double epsilon;
  double weight_decay;
  bool decoupled;  // AdamW
};

// Bias corrections in double from the step number (1 for the first update, never 0; 64 bits, never a float). The betas
// are below 1.
AdamScalars adam_scalars(const AdamHyperparameters& hyperparameters, std::uint64_t step, double gradient_scale);

enum class ParameterFormat : std::uint8_t {
  split_bf16,  // parameter: bf16 (2 bytes), master: signed 16-bit remainder (2 bytes); fp32 rebuilt bit for bit
  fp16,        // parameter: fp16 (2 bytes, nearest-even of master), master: fp32 (4 bytes)
  fp32,        // parameter: fp32 (4 bytes), master: unused
};
// bf16 moments are lossy: at beta2 = 0.999 a second moment decays by less than half a bf16 unit in the last place, so
// it grows with the gradients but does not shrink.
enum class ElementType : std::uint8_t { fp32, bf16, int8 };  // int8: blocks of moments.h, of moments only

// All arrays hold `count` elements and are aligned to their element; none may overlap another. 8-bit moments begin with
// a block and end with a whole one, of which the part beyond `count` becomes 0: a range is cut between blocks only.
struct AdamArrays {
  ParameterFormat parameter_format = ParameterFormat::split_bf16;
  ElementType moment_type = ElementType::fp32;
  ElementType gradient_type = ElementType::fp32;
  void* parameter = nullptr;   // in and out
  void* master = nullptr;      // in and out
  void* exp_avg = nullptr;     // in and out
  void* exp_avg_sq = nullptr;  // in and out
  const void* gradient = nullptr;
  void* published = nullptr;  // optional second destination of the new parameter, same format
};

// A count of 0 touches nothing.
void adam(const AdamScalars& scalars, const AdamArrays& arrays, std::size_t count);

}  // namespace ballast::kernels
