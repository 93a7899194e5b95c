// A whole trainer in one file: a line is fitted to points, its parameters and optimizer states on NVMe. The README
// shows this program; the tests build it against the installed package and run it. SPDX-License-Identifier: Apache-2.0
#include <ballast/engine/engine.h>

#include <cmath>
#include <cstdio>
#include <exception>
#include <span>

namespace {

constexpr int kInputs = 64;
constexpr int kPoints = 256;

// Point i, input j; and what is to be learnt from it.
float input(int point, int j) { return std::sin(0.37f * static_cast<float>(point * kInputs + j)); }
float target(int point) {
  float sum = 0.5f;
  for (int j = 0; j < kInputs; ++j) sum += input(point, j) * (j % 3 == 0 ? 1.0f : -0.25f);
  return sum;
}

double train(const char* folder) {
  ballast::Config config;
  config.budget = {.device_bytes = std::uint64_t{16} << 20, .host_bytes = std::uint64_t{64} << 20};
  config.nvme.paths = {folder};
  config.placement = {.automatic = false,
                      .parameters = ballast::Tier::nvme,
                      .gradients = ballast::Tier::host,
                      .optimizer = ballast::Tier::nvme};
  config.precision.parameters = ballast::DataType::fp32;
  config.optimizer.learning_rate = 0.05;
  config.optimizer.weight_decay = 0;
  ballast::Engine engine(config);

  const auto line = engine.add_unit("line", {{"weight", {kInputs}}, {"bias", {1}}});
  const auto weight = engine.parameter(line, "weight");
  const auto bias = engine.parameter(line, "bias");
  engine.commit();
  engine.initialize([](ballast::ParameterId, std::int64_t, std::span<float> values) {
    for (float& value : values) value = 0;
  });

  ballast::Stream stream = engine.stream();
  double loss = 0;
  for (int i = 0; i < 200; ++i) {
    auto step = engine.begin_step();
    auto pass = step.begin_pass();
    auto parameters = engine.acquire(line, stream);
    auto gradients = engine.gradients(line, stream);
    stream.enqueue([&loss, w = static_cast<const float*>(parameters[weight].data),
                    b = static_cast<const float*>(parameters[bias].data),
                    dw = static_cast<float*>(gradients[weight].data), db = static_cast<float*>(gradients[bias].data)] {
      loss = 0;
      *db = 0;
      for (int j = 0; j < kInputs; ++j) dw[j] = 0;
      for (int point = 0; point < kPoints; ++point) {
        float error = *b - target(point);
        for (int j = 0; j < kInputs; ++j) error += w[j] * input(point, j);
        loss += error * error / kPoints;
        *db += 2 * error / kPoints;
        for (int j = 0; j < kInputs; ++j) dw[j] += 2 * error * input(point, j) / kPoints;
      }
    });
    gradients.commit(stream);
    parameters.release(stream);
    pass.end();
    const auto norm = step.finish_backward();
    if (norm.finite) step.update();
    if (i % 50 == 0) std::printf("step %3d  loss %.6f  norm %.4f\n", i, loss, norm.value);
  }

  float learnt = 0;
  engine.read(bias, 0, {&learnt, 1});
  std::printf("loss %.6f, bias %.3f (0.5 was to be found)\n", loss, learnt);
  return loss;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return train(argc > 1 ? argv[1] : "run") < 0.01 ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
