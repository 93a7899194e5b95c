// Parameters alone, by name, from a checkpoint of any model: where fine-tuning begins.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/engine/checkpoint.h>

#include <optional>
#include <utility>

namespace ballast {

Engine::Fill parameters_of(CheckpointReader& from, const std::vector<ModelUnit>& units, Engine::Fill others) {
  std::vector<std::vector<std::optional<std::size_t>>> places;  // of each parameter there
  std::string missing;
  for (const ModelUnit& unit : units) {
    std::vector<std::optional<std::size_t>>& of_unit = places.emplace_back();
    for (const ParameterSpec& parameter : unit.parameters) {
      const std::string name = unit.name + "/" + parameter.name;
      of_unit.push_back(from.find(unit.name, parameter.name));
      if (!of_unit.back()) {
        missing += (missing.empty() ? "" : ", ") + name;
      } else if (from.parameters()[*of_unit.back()].shape != parameter.shape) {
        throw ConfigError("parameter " + name + " has another shape in " + from.path());
      }
    }
  }
  if (!missing.empty() && !others) throw ConfigError(from.path() + " does not hold " + missing);
  return [&from, places = std::move(places), others = std::move(others)](ParameterId id, std::int64_t first,
                                                                         std::span<float> values) {
    if (id.unit >= places.size() || id.index >= places[id.unit].size()) {
      throw UsageError("parameters_of was given fewer units or parameters than the engine has");
    }
    if (const auto place = places[id.unit][id.index]) {
      from.read(*place, first, values);
    } else {
      others(id, first, values);
    }
  };
}

}  // namespace ballast
