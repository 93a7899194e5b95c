// The scalars of one Adam update, in double from the step number.
// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "ballast/kernels/adam.h"

namespace ballast::kernels {

AdamScalars adam_scalars(const AdamHyperparameters& hyperparameters, std::uint64_t step, double gradient_scale) {
  const double t = static_cast<double>(step);
  const double correction1 = 1.0 - std::pow(hyperparameters.beta1, t);
  const double correction2 = 1.0 - std::pow(hyperparameters.beta2, t);
  const double decay = hyperparameters.weight_decay;

  AdamScalars scalars{};
  scalars.gradient_scale = static_cast<float>(gradient_scale);
  scalars.beta1 = static_cast<float>(hyperparameters.beta1);
  scalars.one_minus_beta1 = static_cast<float>(1.0 - hyperparameters.beta1);
  scalars.beta2 = static_cast<float>(hyperparameters.beta2);
  scalars.one_minus_beta2 = static_cast<float>(1.0 - hyperparameters.beta2);
  scalars.step_size = static_cast<float>(hyperparameters.learning_rate / correction1);
  scalars.inverse_sqrt_correction2 = static_cast<float>(1.0 / std::sqrt(correction2));
  scalars.epsilon = static_cast<float>(hyperparameters.epsilon);
  scalars.decay_factor =
      hyperparameters.decoupled ? static_cast<float>(1.0 - hyperparameters.learning_rate * decay) : 1.0F;
  scalars.l2_decay = hyperparameters.decoupled ? 0.0F : static_cast<float>(decay);
  return scalars;
}

}  // namespace ballast::kernels
