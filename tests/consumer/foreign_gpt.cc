// The reference trainer built outside of the source tree's build: a few steps, whose loss must fall.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/engine/engine.h>

#include <cstdio>
#include <exception>
#include <string>

#include "gpt/trainer.h"

namespace {

bool learns(const std::string& configs, const std::string& folder) {
  ballast::Config config = ballast::Config::from_file(configs + "/engine/nvme.json");
  config.nvme.paths = {folder};
  config.optimizer.learning_rate = 2e-3;
  ballast::Engine engine(config);
  const auto shape = ballast::gpt::GptShape::from_file(configs + "/models/gpt-tiny.json");
  ballast::gpt::GptTrainer trainer(engine, shape, {.batch = 2, .sequence = 32},
                                   ballast::gpt::TokenData::open(configs + "/engine/nvme.json"));
  engine.commit();
  engine.initialize(trainer.fill());
  const double first = trainer.step(0).loss;
  double last = first;
  for (std::uint64_t i = 1; i < 12; ++i) last = trainer.step(i).loss;
  std::printf("loss %.3f -> %.3f\n", first, last);
  return last < first - 0.5;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  try {
    return learns(argv[1], argv[2]) ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
